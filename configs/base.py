"""Every key with its meaning, unit, limits and default.

The other configs start from here and change what they need. On the command line any key can be
overridden: `python -m purelora.train --config=configs/qlora.py --config.lora.r=8`. A list is
written `--config.lora.target_modules=q_proj,v_proj`, nothing as `--config.steps=None`. Keys marked
[resumable] may change when a run is resumed.

Keys are declared in `purelora/config`; this file is written from there, by
`python -m purelora.config.document`.
"""

from ml_collections import config_dict


def optional(value: object, kind: type) -> config_dict.FieldReference:
    """A key that may also be None."""
    return config_dict.FieldReference(value, field_type=kind)


def either(value: object) -> config_dict.FieldReference:
    """A key that takes a list, or else a string or None."""
    return config_dict.FieldReference(value, field_type=object)


def table(value: dict[str, object]) -> config_dict.FieldReference:
    """A key that takes a dict; the names in it may have dots."""
    return config_dict.FieldReference(value, field_type=dict)


def get_config() -> config_dict.ConfigDict:
    """All defaults."""
    c = config_dict.ConfigDict()
    # Folder of everything that the run writes: metrics.jsonl, config.json, run.json, checkpoints,
    # tokenizer and, in the end, adapter. [resumable]
    c.workdir = "runs/default"
    # "sft": train on what the assistant (or completion) says; "pretrain": on every token.
    c.task = "sft"
    # Seed of the adapters' initial values, the data order, the eval split and dropout.
    # [from 0 to 4294967295]
    c.seed = 0
    # How long to train, in optimiser steps. Set exactly one of steps and epochs.
    # [steps, at least 1, resumable]
    c.steps = optional(None, int)
    # How long to train, in passes over the data. [passes, at least 1, resumable]
    c.epochs = optional(None, int)
    # Rows per step over all devices. [rows, at least 1]
    c.batch_size = 8
    # The number of micro-batches that a step splits its rows into. [micro-batches, at least 1]
    c.accum_steps = 1
    # Tokens per row. [tokens, from 2 to 16777216]
    c.max_length = 1024
    # Dtype of the computation: "float32" or "bfloat16". Adapters, moments and sums are float32.
    c.dtype = "bfloat16"
    # Compile one layer and scan over the stack (True), or compile every layer by itself (False).
    # [resumable]
    c.scan_layers = True
    # "none": keep what the large matmuls and attention produced for the backward pass; "full":
    # recompute each layer. [resumable]
    c.remat = "none"
    # Tokens whose logits exist at once, on each device. [tokens, at least 1, resumable]
    c.loss_chunk_tokens = 256
    # For mixtures of experts: weight of the load-balancing loss beside the token loss; the losses
    # of the router are recorded whatever their weight. [at least 0 and a float32]
    c.router_aux_loss_coef = 0.0
    # Weight of the router z-loss. [at least 0 and a float32]
    c.router_z_loss_coef = 0.0
    # How the load-balancing loss counts tokens: "rows": in each row and layer by itself, so that it
    # depends on neither mesh nor accum_steps; "transformers": over all rows and layers that a
    # device computes at once, as that library does.
    c.router_aux = "rows"
    # Evaluate every so many steps, and before and after training; None: only before and after.
    # [steps, at least 1, resumable]
    c.eval_steps = optional(None, int)
    # Record (and without a terminal print) the metrics every so many steps.
    # [steps, at least 1, resumable]
    c.log_steps = 1
    # What a loss or gradient that is not finite does: "abort" the run, or "skip" the update.
    # [resumable]
    c.nan_policy = "abort"
    # Prompts to continue greedily before and after training. [resumable]
    c.sample_prompts = ()
    # How many tokens to continue them by at most. [tokens, at least 1, resumable]
    c.sample_tokens = 48
    # Folder of the persistent compilation cache; "default": ~/.cache/purelora/compiled, None: off.
    # [resumable]
    c.compile_cache = optional("default", str)
    # An adapter to start a fresh run from: the folder of a purelora run or of one of its steps, or
    # a PEFT folder, or a MaxText checkpoint. Its ranks, scalings and targets must be those of
    # lora.*. None: start anew. [resumable]
    c.init_adapter = optional(None, str)

    c.model = config_dict.ConfigDict()
    # A built-in model ("smollm2-135m", "tiny"), a Hugging Face folder, a .gguf file, or the folder
    # of a purelora run or of one of its steps: of one that trained all weights, or saved its base.
    # "random:FILE": random weights of the shape in a config.json, and a token for each byte. Or a
    # MaxText checkpoint: its run, its checkpoints, one of its steps, or the step's items.
    # [resumable]
    c.model.path = ""
    # For a MaxText checkpoint, which holds neither: a folder with config.json and tokenizer in
    # Hugging Face's form. [resumable]
    c.model.hf_folder = optional(None, str)
    # Dtype that unquantised base weights are kept in: "float32" or "bfloat16".
    c.model.weights_dtype = "float32"

    c.lora = config_dict.ConfigDict()
    # Train adapters on a frozen base (True), or all weights (False).
    c.lora.enabled = True
    # The method, by PEFT's name for it in small letters: lora, ia3 (without r and alpha) or loha.
    c.lora.peft_type = "lora"
    # Rank of the adapters; their output is scaled by lora_alpha / r. [from 1 to 65536]
    c.lora.r = 16
    # Numerator of that scaling. [a float32 above 0]
    c.lora.lora_alpha = 32.0
    # Probability of dropping an element of an adapter's input, in training only.
    # [at least 0 and below 1]
    c.lora.lora_dropout = 0.0
    # "all-linear" (all but the output head and routers), of these "attention", "mlp" (with the
    # experts) or "experts", a list of names or dotted suffixes, or a regex for a module's full name
    # (model.layers.7.self_attn.q_proj; model.layers.7.mlp.experts.gate_proj is all of its experts).
    c.lora.target_modules = either("all-linear")
    # More targets, by PEFT's names of parameters: "mlp.experts.gate_up_proj" (gate_proj and
    # up_proj), "mlp.experts.down_proj", "mlp.gate.weight" (the router).
    c.lora.target_parameters = ()
    # Modules to leave out, as a list or a regex.
    c.lora.exclude_modules = either(())
    # Numbers of the layers to adapt, for such a word or a list of names; None: all.
    c.lora.layers_to_transform = either(None)
    # Ranks of single modules: {regex: rank}. A regex must match the end of a module's name from a
    # dot on ("k_proj", "layers.3.self_attn.k_proj"); the first one that does counts.
    c.lora.rank_pattern = table({})
    # Alphas of single modules, in the same way.
    c.lora.alpha_pattern = table({})
    # Scale by lora_alpha / sqrt(r) (rsLoRA) instead of lora_alpha / r.
    c.lora.use_rslora = False
    # Learn a magnitude for each output channel beside the adapters' direction (DoRA).
    c.lora.use_dora = False
    # How adapters begin. "default": lora_a uniform and lora_b zero; "gaussian": lora_a normal with
    # standard deviation 1 / r. Out of the weights, which then hold the rest: "pissa" (largest
    # singular values), "olora" (QR); "loftq": what quantisation takes from the weights.
    c.lora.init_lora_weights = "default"
    # Modules to train in full beside the adapters ("lm_head", "embed_tokens", "norm"), in float32.
    # A tied embedding stays tied.
    c.lora.modules_to_save = ()
    # Rows of the embedding to train, by token id; for a tied model they are rows of the head too.
    c.lora.trainable_token_indices = ()
    # Train the model's own biases: "none", "all", or "lora_only" those of adapted modules.
    c.lora.bias = "none"

    c.quant = config_dict.ConfigDict()
    # Type of the frozen base's matrices: "none", "int8", "fp8" (float8_e4m3fn), "int4" or "nf4"
    # (QLoRA's, usually with tile_size=64).
    c.quant.qtype = "none"
    # Inputs that share a scale; None: one scale per output channel. [inputs, at least 1]
    c.quant.tile_size = optional(None, int)
    # Weights that stay unquantised: regexes over the dotted parts of their names.
    c.quant.skip = ("embed_tokens",)

    c.data = config_dict.ConfigDict()
    # A built-in set ("wordnet-definitions") or a .jsonl or .json file. [resumable]
    c.data.train = "wordnet-definitions"
    # A set or file to evaluate on; None: see eval_fraction.
    c.data.eval = optional(None, str)
    # Share of the training records to hold out and evaluate on instead. [at least 0 and below 1]
    c.data.eval_fraction = 0.0
    # Visit the rows of each epoch in an order of its own.
    c.data.shuffle = True
    # Put several records into a row; they do not see each other.
    c.data.packing = True
    # Records longer than max_length: "drop" them, "truncate" them, or "raise" an error.
    c.data.too_long = "drop"
    # A Jinja file to use instead of the model's own chat template.
    c.data.chat_template = optional(None, str)
    # Further variables of the template, such as {"enable_thinking": False} for Qwen3's.
    c.data.chat_template_kwargs = table({})
    # The date that a template which prints today's date is given, so that runs repeat.
    c.data.template_date = "2026-01-01"
    # A template that renders a conversation's beginning differently once it goes on: "raise" an
    # error, or train on the "last_turn" only.
    c.data.unnested_template = "raise"

    c.optim = config_dict.ConfigDict()
    # The optimiser: "adamw", "sgd", or another name in OPTIMISERS of
    # purelora/training/optimisers.py.
    c.optim.name = "adamw"
    # An optimiser of your own in its place: "module:function", found in the folder of the config or
    # the current one. The function is given these settings and returns an
    # optax.GradientTransformation without learning rate, such as optax.scale_by_lion().
    c.optim.factory = optional(None, str)
    # Peak learning rate. [a float32 above 0]
    c.optim.learning_rate = 0.0002
    # The learning rate after the warm-up: "constant", or "linear" or "cosine" down to min_lr_ratio
    # times the peak, or another name in SCHEDULES of that file.
    c.optim.schedule = "cosine"
    # What is left of the learning rate at the end of the decay. [from 0 to 1]
    c.optim.min_lr_ratio = 0.1
    # Steps of linear warm-up. [steps, at least 0]
    c.optim.warmup_steps = 0
    # The step at which the decay ends; None: the last step. Set it if you may continue the run for
    # longer. [steps, at least 1]
    c.optim.schedule_steps = optional(None, int)
    # Adam's decay rate of the gradients' mean. [at least 0 and below 1]
    c.optim.b1 = 0.9
    # Adam's decay rate of the squared gradients' mean. [at least 0 and below 1]
    c.optim.b2 = 0.999
    # Adam's epsilon. [a float32 above 0]
    c.optim.eps = 1e-08
    # Momentum of SGD. [at least 0 and below 1]
    c.optim.momentum = 0.0
    # LoRA+: the learning rate of lora_b (and of magnitudes, biases and norms) is so many times that
    # of the rest; adapters of the embedding keep the plain one. [a float32 above 0]
    c.optim.loraplus_lr_ratio = 1.0
    # Decoupled weight decay, on adapters and matrices only. [at least 0]
    c.optim.weight_decay = 0.0
    # Largest global norm of the gradient; None: no clipping. [a float32 above 0]
    c.optim.clip_norm = optional(1.0, float)

    c.mesh = config_dict.ConfigDict()
    # Devices along which the batch is split. [devices, at least 1, resumable]
    c.mesh.data = 1
    # Devices along which the batch and the storage of the base are split; None: all devices that
    # the others leave. [devices, at least 1, resumable]
    c.mesh.fsdp = optional(None, int)
    # Devices along which the batch and the experts are split. [devices, at least 1, resumable]
    c.mesh.expert = 1
    # Devices along which the matmuls are split, by heads, MLP width and vocabulary.
    # [devices, at least 1, resumable]
    c.mesh.tensor = 1
    # From logical axis to mesh axis; "none" keeps an axis whole. The first rule wins whose mesh
    # axis is not used in the same array yet. A large weight that no rule splits is an error, unless
    # a rule with "none" asks for it. [resumable]
    c.mesh.rules = (
        "embed:fsdp",
        "experts:expert",
        "heads:tensor",
        "kv_heads:tensor",
        "mlp:tensor",
        "vocab:tensor",
    )
    # Rules for some modules, which come before the others: from a regular expression for the end of
    # a module's path to rules with commas between: {"lm_head": "vocab:fsdp,embed:none"}.
    # [resumable]
    c.mesh.overrides = table({})
    # Split the adapters along fsdp too, instead of keeping a copy on each device. [resumable]
    c.mesh.shard_adapters = False
    # Keep what was gathered of a sharded base for the backward pass: one gather of each weight a
    # micro-batch instead of two, and then the whole base (its codes) on every device. Only with
    # remat="none": with "full" the backward pass shares a gather with what it recomputes.
    # [resumable]
    c.mesh.keep_gathered = False

    c.checkpoint = config_dict.ConfigDict()
    # Save every so many steps, beside the end of the run and what the next keys add; None: only
    # then. [steps, at least 1, resumable]
    c.checkpoint.save_steps = optional(None, int)
    # Save also at the first step that ends so many seconds after the last save; None: not by time.
    # [seconds, above 0, resumable]
    c.checkpoint.save_secs = optional(None, float)
    # Save the first step after each start too and wait for it, so that a disk that cannot be
    # written to ends the run at once and not after hours. [resumable]
    c.checkpoint.save_first = True
    # Save the frozen base too: a checkpoint is then a whole model, which model.path may name. Not
    # with lora.modules_to_save, lora.bias or adapters that begin out of the weights ("pissa",
    # "olora", "loftq"): the original of what these change is not in it. [resumable]
    c.checkpoint.save_base = False
    # Train on while a checkpoint is being written; the step waits only for the copy to the host.
    # [resumable]
    c.checkpoint.async_save = True
    # How many of the newest checkpoints to keep. [checkpoints, at least 1, resumable]
    c.checkpoint.keep_last = 2
    # Keep the steps that are multiples of this as well; None: none of them.
    # [steps, at least 1, resumable]
    c.checkpoint.keep_every = optional(None, int)
    # Keep the checkpoint with the lowest eval loss as well; eval_steps must be a multiple of
    # save_steps. [resumable]
    c.checkpoint.keep_best = False
    # "auto": continue the run in workdir if there is one; "must": fail if there is none; "never":
    # fail if there is one. A run is continued with the settings it began with, but for the
    # resumable ones: init_adapter is used up; of model.path, model.hf_folder and data.train
    # fingerprints tell whether they are the same; scan_layers, remat, loss_chunk_tokens and mesh.*
    # change rounding only. [resumable]
    c.checkpoint.resume = "auto"
    return c
