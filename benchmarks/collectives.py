"""What a step moves between devices, read off the compiled program: FSDP 8, and TP 4 × FSDP 2.

    python benchmarks/collectives.py

Llama 3.2 1B's shape with an int8 base (the embedding too), LoRA r = 16 on all linear layers, one
row of 128 tokens a device and micro-batch, 8 virtual devices of the CPU; no weights are made. Bytes
are what one device receives, trip counts of loops multiplied. A quantised base is gathered as codes
and scales. A last table counts the operations that reduce the adapters' gradients: one, whatever
the number of layers and micro-batches. With TP they are two, as adapters that are split over
`tensor` are summed over fewer devices than the others.
"""

import argparse
import pathlib

from common import runs

LAYERS = 16
MESHES = {"FSDP 8": (8, 1), "TP 4 × FSDP 2": (2, 4)}
SIZES = ((16, 1), (16, 4), (4, 1), (4, 4))  # Layers and micro-batches.


SMOKE_LAYERS, SMOKE_SIZES = 2, ((2, 1), (3, 2))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="a small shape, one mesh")
    smoke = parser.parse_args().smoke
    runs.use_virtual_devices(8)
    if smoke:
        runs.begin_smoke()
        show(runs.SHAPES / "small" / "llama3_1_8b.json", ["FSDP 8"], SMOKE_LAYERS, SMOKE_SIZES)
    else:
        show(runs.SHAPES / "llama3_2_1b.json", list(MESHES), LAYERS, SIZES)


def show(
    shape: pathlib.Path, meshes: list[str], layers: int, sizes: tuple[tuple[int, int], ...]
) -> None:
    """Prints what a step of this shape with so many layers moves, and counts its reductions."""
    from purelora.analysis import estimate_report

    for name in meshes:
        traffic = compiled(shape, layers, 1, MESHES[name])[1].traffic()
        print(
            f"{name}\n  {'collective':<22}{'dtype':<10}{'group':>6}{'count':>8}{'MB received':>14}"
        )
        print("\n".join(map(estimate_report.traffic_row, traffic)))
        gathers = {row.dtypes: row.received_bytes for row in traffic if row.kind == "all-gather"}
        codes, all_bytes = gathers[("s8",)], sum(gathers.values())
        print(
            f"  gathers: int8 codes {codes / 1e6:,.1f} MB, scales {(all_bytes - codes) / 1e6:,.1f} "
            f"MB; as float32 weights they would be {codes * 4 / 1e6:,.1f} MB: "
            f"{all_bytes / (codes * 4):.3f} of that\n"
        )
    print("reductions of the adapters' gradients in a step")
    print(f"  {'mesh':<16}{'layers':>7}{'accum_steps':>13}{'in loops':>10}{'outside':>9}")
    for name in meshes:
        for number, accum in sizes:
            inside = [c.in_loop for c in reductions(shape, number, accum, MESHES[name])]
            counts = f"{inside.count(True):>10}{inside.count(False):>9}"
            print(f"  {name:<16}{number:>7}{accum:>13}{counts}")


def compiled(shape: pathlib.Path, layers: int, accum: int, mesh: tuple[int, int]):
    """The plan, and its compiled step as text, read."""
    import jax

    from purelora.analysis import footprint
    from purelora.training import planning

    fsdp, tensor = mesh
    keys = {
        "model.path": shape,
        "max_length": 128,
        "quant.skip": "()",
        "batch_size": fsdp * accum,
        "accum_steps": accum,
        "mesh.fsdp": fsdp,
        "mesh.tensor": tensor,
    }
    config = runs.settings("qlora", keys)
    plan = planning.make_plan(config, runs.sizes(shape, layers), str(shape), jax.devices())
    return plan, footprint.program_of(plan)


def reductions(shape: pathlib.Path, layers: int, accum: int, mesh: tuple[int, int]):
    """The collectives that sum gradients: known by the adapters' shapes on a device."""
    import jax

    from purelora.sharding import specs

    plan, program = compiled(shape, layers, accum, mesh)
    shapes = jax.tree.map(
        lambda leaf, sharding: sharding.shard_shape(leaf.shape),
        plan.trainable_infos,
        specs.shardings(plan.trainable_specs, plan.mesh),
    )
    adapters = set(jax.tree.leaves(shapes, is_leaf=lambda shape: isinstance(shape, tuple)))
    return [
        c
        for c in program.collectives()
        if c.kind in ("all-reduce", "reduce-scatter")
        and any(array.shape in adapters for array in c.arrays)
    ]


if __name__ == "__main__":
    main()
