"""What a device holds: counted state equals the arrays, and what is kept follows the policy."""

import dataclasses

import jax
import pytest

from farspan.models import DecoderConfig
from farspan.plan import memory
from farspan.plan.trace import round_bytes_per_token, runs, saved_bytes_per_token
from farspan.recipes import get_recipe
from farspan.train.config import DataConfig, OptimizerConfig, ParallelConfig, TrainConfig
from farspan.train.fit import make_workload
from farspan.train.step import build_setup

MODEL = DecoderConfig(
    vocab_size=96, num_layers=2, model_dim=32, num_heads=4, num_kv_heads=2, head_dim=8, ffn_dim=64,
    tie_embeddings=False,
)  # fmt: skip
CONFIG = TrainConfig(
    model=MODEL,
    data=DataConfig(seq_len=64),
    parallel=ParallelConfig(context_parallel_strategy="ring", context_parallel_size=4),
    optimizer=OptimizerConfig(),
    batch_size=4,
    kernel="reference",
)
SPLITS = {
    "one device": {"context_parallel_size": 1},
    "ring 4": {},
    "data 2 x ring 4": {"data_parallel_size": 2},
    "fsdp 2 x ulysses 2": {
        "context_parallel_strategy": "ulysses", "context_parallel_size": 2,
        "fsdp_parallel_size": 2,
    },
}  # fmt: skip


def varied(*, model=None, parallel=None, **run):
    config = dataclasses.replace(CONFIG, **run)
    return dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, **(model or {})),
        parallel=dataclasses.replace(config.parallel, **(parallel or {})),
    )


def sizes(config):
    return {item.kind: item.num_bytes for item in memory.account(make_workload(config)).items}


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize(
    "model",
    [
        {},
        {"model_dim": 30, "tie_embeddings": True},  # 30 is split over 2 of 4 devices
        {"param_dtype": "bfloat16"},
    ],
)
def test_state_is_that_of_the_arrays(split, model):
    config = varied(model=model, parallel=SPLITS[split])
    state = build_setup(config).init_state()
    found = [x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(state)]
    params = [x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(state.params)]
    account = memory.account(make_workload(config))
    assert account.state_bytes == sum(found)
    assert sizes(config)["parameters"] == sum(params)


def test_a_published_model():
    """Llama 3.1 8B has 8,030,261,248 parameters; 64 devices share all but the norms."""
    config = get_recipe("llama3_8b_long").build()
    assert config.model.num_parameters == 8_030_261_248
    norms = 65 * 4096
    assert sizes(config)["parameters"] == 4 * ((8_030_261_248 - norms) // 64 + norms)


LAYERS = [
    {},
    {"scan_layers": False},
    {"sliding_window": 9, "sliding_window_pattern": 3, "num_layers": 5},
]


@pytest.mark.parametrize("layers", LAYERS)
def test_attention_and_projections_run_as_often_as_the_policy_says(layers):
    def found(policy, name):
        model = dataclasses.replace(MODEL, remat_policy=policy, **layers)
        counts, count = runs(model), model.num_layers
        assert counts["backward", name] == count
        return counts["forward", name] / count

    assert found("none", "attention") == found("save_attention", "attention") == 1
    assert found("full", "attention") == 2
    assert found("none", "query") == found("none", "down") == 1
    assert found("full", "query") == found("save_attention", "gate") == 2
    if "num_layers" not in layers:
        assert found("full", "down") == 1  # nothing in backward needs a layer's output


def test_what_is_kept_for_each_token():
    """Each recomputed layer keeps its input, and what the policy names."""

    def per_layer(policy, **more):
        one, two = (
            saved_bytes_per_token(
                dataclasses.replace(
                    MODEL, remat_policy=policy, dtype="bfloat16", num_layers=n, **more
                )
            )
            for n in (2, 4)
        )
        return (two - one) // 2

    stream, out, lse = 32 * 2, 4 * 8 * 2, 4 * 4
    assert per_layer("full") == per_layer("full", scan_layers=False) == stream
    assert per_layer("save_attention") == stream + out + lse
    assert per_layer("none") > stream + out + lse + 3 * 64 * 2
    narrow = dataclasses.replace(MODEL, dtype="bfloat16")
    # A scan keeps what positions alone decide once for all layers: the factors and choices of RoPE,
    # of one query and two key arrays. A round has them for itself, and counts no wider array.
    rope = (4 + 2 * 2) * 8 * (2 + 1)
    assert round_bytes_per_token(narrow) == per_layer("none") + rope - lse
    assert stream + out < round_bytes_per_token(narrow)
    assert round_bytes_per_token(MODEL) > round_bytes_per_token(narrow)


def test_tokens_and_rows_decide_the_rest():
    one, four = sizes(CONFIG), sizes(varied(parallel={"context_parallel_size": 8}))
    assert one["saved activations"] == 2 * four["saved activations"]
    parts = varied(gradient_accumulation_steps=4)
    assert sizes(parts)["saved activations"] * 4 == one["saved activations"]
    assert sizes(parts)["gradients"] == 2 * one["gradients"]
    gathered = varied(parallel={"context_parallel_strategy": "all_gather"})
    assert sizes(gathered)["attention"] > one["attention"]


def test_the_peak_is_what_lasts_and_the_largest_phase():
    account = memory.account(make_workload(CONFIG))
    lasting = sum(item.num_bytes for item in account.items if item.phase == "step")
    assert account.peak_bytes == lasting + max(account.phases.values())
    assert sum(item.num_bytes for item in account.at_peak) == account.peak_bytes
    largest = [item.num_bytes for item in account.at_peak]
    assert largest == sorted(largest, reverse=True)
    assert all(item.remedy for item in account.items)


def test_rows_that_cannot_be_shared_out_are_refused():
    config = varied(batch_size=3, parallel={"data_parallel_size": 2})
    with pytest.raises(ValueError, match=r"got 3 rows, 2 groups and 1 parts; use 4 rows"):
        make_workload(config)


def test_sizes_in_words():
    assert [memory.binary_size(n) for n in (12, 1536, 3 * 2**30)] == [
        "12 B",
        "1.50 KiB",
        "3.00 GiB",
    ]
