"""Every choice with every other equals the dense oracle, or is refused with the remedy.

All values are in `farspan.testing.support`. Their full product is endless, so the default lane
walks a covering array: every pair of values of any two choices occurs in some case, or is refused.
`make test ARGS="-m slow"` does the same for every triple of values.
"""

import functools
import itertools

import jax
import pytest

import farspan
from farspan.testing import AttentionCase, attention_parity, support

FLOAT32_ROUNDING = 4e-7


@pytest.fixture(autouse=True, scope="module")
def compile_in_less_time():
    """Machine code need not be fast here; other tests run what is optimised."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def name_of(selection):
    return "-".join(value.replace(" ", "_") for value in selection.values())


def check(selection):
    case, context = support.case_of(selection), support.context_of(selection)
    plainly = selection["kernel"] == "reference"  # quick to compile
    kernel = support.kernel_of(selection)
    for quantity in attention_parity(case, context, kernel, plainly=plainly):
        assert quantity.ok, (selection, quantity)


PAIRWISE = support.covering_array()


@pytest.mark.parametrize("selection", PAIRWISE, ids=name_of)
def test_pairwise(selection):
    check(selection)


CELLS = support.cells()


def test_every_exact_cell_of_the_table_is_walked():
    """What the README calls exact is computed in some case above."""
    walked = {
        (choice, value, selection["strategy"])
        for selection in PAIRWISE
        for choice, value in selection.items()
    }
    assert [cell for cell, refused in CELLS.items() if refused is None and cell not in walked] == []


def test_every_pair_is_walked_or_refused():
    walked = {pair for row in PAIRWISE for pair in itertools.combinations(sorted(row.items()), 2)}
    names = sorted(support.CHOICES)
    for first, second in itertools.combinations(names, 2):
        for a, b in itertools.product(support.CHOICES[first], support.CHOICES[second]):
            if ((first, a), (second, b)) not in walked:
                for strategy in support.CHOICES["strategy"]:
                    chosen = dict(support.usual(strategy)) | {first: a, second: b}
                    assert support.refusal(chosen) is not None, chosen


@pytest.mark.parametrize(
    "cell", [cell for cell, refused in CELLS.items() if refused is not None], ids=str
)
def test_refused_cells_name_rule_values_and_remedy(cell):
    """Before anything runs: the call raises while it is traced."""
    choice, value, strategy = cell
    selection = support.usual(strategy, **{choice: value})
    case, context = support.case_of(selection), support.context_of(selection)
    inputs = case.inputs()
    with pytest.raises(ValueError, match=r"must|only.*, got .*; .*use ") as caught:
        jax.eval_shape(
            functools.partial(
                farspan.attention, context=context, **case.options(), **inputs.labels
            ),
            *inputs.tokens.values(),
        )
    assert str(caught.value) == CELLS[cell]


PARTS = 16


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_every_triple(part):
    for selection in triples()[part::PARTS]:
        check(selection)


@functools.cache
def triples():
    return support.covering_array(3)


@pytest.mark.smoke
@pytest.mark.parametrize("strategy", support.CHOICES["strategy"])
def test_each_strategy(strategy):
    """One case for each strategy in the short lane: packed, grouped heads, eight devices."""
    mesh = farspan.make_mesh(cp_ring=4, cp_ulysses=2)
    context = farspan.ContextParallel(mesh, strategy, "zigzag")
    mask = farspan.Causal() & farspan.SlidingWindow(9, 0)
    case = AttentionCase(mask=mask, documents=(5, 23, 1, 28), sinks=True)
    for quantity in attention_parity(case, context):
        assert quantity.ok, quantity


@pytest.mark.parametrize("strategy", support.CHOICES["strategy"])
def test_a_mesh_of_one_device(strategy):
    context = farspan.ContextParallel(farspan.make_mesh(), strategy, "zigzag")
    mask = farspan.Causal() & farspan.SlidingWindow(9, 0)
    case = AttentionCase(mask=mask, documents=(5, 23, 1, 28), dropout_rate=0.2)
    for quantity in attention_parity(case, context, "reference", plainly=False):
        assert quantity.ok, quantity


def test_data_and_tensor_axes_beside_context():
    mesh = farspan.make_mesh(data=2, cp_ring=2, tensor=2)
    context = farspan.ContextParallel(mesh, "ring", "zigzag")
    case = AttentionCase(documents=(5, 23, 1, 28), sinks=True)
    for quantity in attention_parity(case, context):
        assert quantity.ok, quantity


@pytest.mark.parametrize("degree", [2, 4, 8])
def test_error_does_not_grow_with_the_ring_in_bfloat16(degree):
    """Partial outputs and gradients are merged in float32."""
    case = AttentionCase(dtype="bfloat16", seq_len=512, batch=1, num_heads=4)
    alone = {row.quantity: row.error for row in attention_parity(case, None)}
    context = farspan.ContextParallel(farspan.make_mesh(cp_ring=degree), "ring", "zigzag")
    for row in attention_parity(case, context):
        assert row.error <= max(1.5 * alone[row.quantity], FLOAT32_ROUNDING), row
