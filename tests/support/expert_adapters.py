"""What tests of adapters on experts share."""

from purelora.core import trees

EXPERTS = tuple(f"layers.mlp.experts.{name}_proj" for name in ("gate", "up", "down"))


def lora_masked(adapters, m):
    """Zero where a rank is smaller than what is stored, as initial values and gradients are."""
    flat = trees.flatten(adapters)
    for path, target in m.adaptation.targets.items():
        for position, r in enumerate(target.ranks):
            a, b = f"{path}.lora_a", f"{path}.lora_b"
            flat[a] = flat[a].at[position, ..., r:].set(0)
            flat[b] = flat[b].at[position, ..., r:, :].set(0)
    return trees.unflatten(flat)
