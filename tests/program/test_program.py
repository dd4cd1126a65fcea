"""Programs: what their text means, and what is refused of it."""

from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Callable

import pytest
import torch

from oxytorch.program.program import Program, Some, Step, Steps, Value
from threads import errors_in_threads

TEXT = """inputs 2 1 1
%3 = aten::linear %0 %1 some %2
%4 = add %3 %2 2.0
$1 = size %4 -1
$2 = * $1 3
$3 = + $2 $0
[ %5 %6 ] = aten::split_with_sizes %4 [ 1 2 ] -1
%7 = aten::expand %5 [ 4 $1 ] false
%8 = aten::softmax.int %7 1 none
outputs %8 %6 $3 %0"""


def _inputs() -> list[torch.Tensor]:
    return [torch.arange(8.0).reshape(4, 2), torch.ones(3, 2)]


def _wanted(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> list[torch.Tensor]:
    y = torch.nn.functional.linear(x, weight, bias) + bias * 2
    return [y[:, :1].expand(4, 3).softmax(1), y[:, 1:], x]


@pytest.mark.parametrize(
    "copied", [lambda p: p, copy.deepcopy, lambda p: pickle.loads(pickle.dumps(p))]
)
def test_a_program_computes_what_its_text_says(copied: object) -> None:
    bias = torch.tensor([1.0, 2.0, 3.0])
    program = copied(Program(TEXT, [bias]))  # type: ignore[operator]
    assert str(program) == TEXT
    for _ in range(2):
        tensors, sizes = program(_inputs(), [10])
        assert sizes == [19]
        for found, wanted in zip(tensors, _wanted(*_inputs(), bias), strict=True):
            torch.testing.assert_close(found, wanted, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("sign", "wanted"),
    [("+", -4), ("-", -10), ("*", -21), ("/", -3), ("%", 2), ("<", -7), (">", 3)],
)
def test_arithmetic_is_that_of_python(sign: str, wanted: int) -> None:
    program = Program(f"inputs 0 2 0\n$2 = {sign} $0 $1\noutputs $2", [])
    assert program([], [-7, 3]) == ([], [wanted])


def test_steps_are_written_in_order_and_unused_ones_dropped() -> None:
    x, y, unused, size = Value(), Value(), Value(), Value(is_size=True)
    number = Value()
    steps = Steps([x], {number: torch.tensor(2.0), Value(): torch.ones(3)})
    steps.steps = [
        Step("aten::relu", [x], [unused]),
        Step("size", [x, "0"], [size]),
        Step("aten::mul.Tensor", [x, number], [y]),
        Step(
            "aten::sum.dim_IntList", [y, Some(["0"]), "false", "none"], [Value()], has_effect=True
        ),
    ]
    steps.outputs = [y, size]
    steps.drop_unused()
    program = steps.program()
    assert "relu" not in str(program) and "sum" in str(program) and len(program.constants) == 1
    assert torch.equal(program([torch.ones(3)])[0][0], torch.full((3,), 2.0))


BAD = {
    "nothing": "",
    "no inputs": "outputs",
    "no outputs": "inputs 1 0 0\n%1 = aten::relu %0",
    "after the outputs": "inputs 1 0 0\noutputs %0\n%1 = aten::relu %0",
    "a value that nothing made": "inputs 1 0 0\n%1 = aten::relu %7\noutputs %1",
    "a value before it is made": "inputs 1 0 0\n%1 = aten::relu %2\n%2 = aten::relu %0\noutputs %1",
    "another number": "inputs 1 0 0\n%5 = aten::relu %0\noutputs %5",
    "constants": "inputs 1 0 2\noutputs %0",
    "a list that does not end": "inputs 1 0 0\n%1 = aten::view %0 [ 1\noutputs %1",
    "a text that does not end": 'inputs 1 0 0\n%1 = aten::gelu %0 "none\noutputs %1',
    "no operator": "inputs 1 0 0\n%1 = relu %0\noutputs %1",
    "no arithmetic": "inputs 0 2 0\n$2 = ? $0 $1\noutputs $2",
    "arithmetic on tensors": "inputs 2 0 0\n%2 = + %0 %1\noutputs %2",
    "the size of a size": "inputs 0 1 0\n$1 = size $0 0\noutputs $1",
    "a number that is none": "inputs 1 0 0\n%1 = aten::relu 1x\noutputs %1",
    "an unknown name": "inputs 1 0 0\n%1 = aten::relu =float1\noutputs %1",
    "a negative count": "inputs -1 0 0\noutputs",
    "a count too large": "inputs 99999999999 0 0\noutputs",
    "no equals sign": "inputs 1 0 0\n%1\noutputs %1",
}


@pytest.mark.parametrize("text", BAD.values(), ids=BAD)
def test_what_is_no_program_is_refused(text: str) -> None:
    with pytest.raises(RuntimeError, match="oxytorch program: "):
        Program(text, [])


def _x() -> Value:
    return Value(meta=torch.empty(2, 3))


NO_CALLS: dict[str, tuple[Callable[[Value], Step], str]] = {
    "more results": (lambda x: Step("aten::relu", [x], [Value(), Value()]), "expected 1 results"),
    "no result": (lambda x: Step("aten::relu", [x], []), "aten::relu: expected 1 results, got 0"),
    "fewer results": (
        lambda x: Step("aten::var_mean", [x, "true"], [Value()]),
        "aten::var_mean: expected 2 results, got 1",
    ),
    "results for a list": (
        lambda x: Step("aten::unbind.int", [x, "0"], [Value(), Value()]), "it returns a list",
    ),
    "a list": (lambda x: Step("aten::relu", [x], [Value()], returns_list=True), "returns none"),
    "fewer arguments": (lambda x: Step("aten::gelu", [x], [Value()]), "expected 2 arguments, got"),
    "more arguments": (lambda x: Step("aten::relu", [x, "1"], [Value()]), "expected 1 arguments"),
    "a word for a tensor": (
        lambda x: Step("aten::maximum", [x, "0"], [Value()]), "argument 1 of TensorType, got '0'",
    ),
    "a tensor for a size": (
        lambda x: Step("aten::select.int", [x, x, "0"], [Value()]), "argument 1 of IntType",
    ),
    "a size for a tensor": (
        lambda x: Step("aten::relu", [Value(is_size=True)], [Value()]), "argument 0 of TensorType",
    ),
    "a tensor for an optional one": (
        lambda x: Step("aten::linear", [x, x, x], [Value()]), "of OptionalType of TensorType",
    ),
    "a word for a list": (
        lambda x: Step("aten::view", [x, "6"], [Value()]), "of ListType of SymIntType, got '6'",
    ),
    "a number of any type": (
        lambda x: Step("aten::clamp_min", [x, "0"], [Value()]), "aten::clamp_min: .*NumberType",
    ),
    "a list with others": (lambda x: Step("aten::cat", [[x, "0"], "0"], [Value()]), "of ListType"),
    "no operator": (lambda x: Step("aten::rolu", [x], [Value()]), "aten::rolu"),
    "ours": (lambda x: Step("oxytorch::activation", [x, '"elu"'], [Value()]), "expected 3 argu"),
}  # fmt: skip


@pytest.mark.parametrize(("make", "message"), NO_CALLS.values(), ids=NO_CALLS)
def test_a_step_that_is_no_call_of_its_operator_is_refused(
    make: Callable[[Value], Step], message: str
) -> None:
    """Run, it would take numbers for addresses and end the process."""
    x = _x()
    step = make(x)
    inputs = dict.fromkeys([x, *step.taken])
    steps = Steps([*inputs], {}, [step], [value for value in step.results if value is not None])
    with pytest.raises(RuntimeError, match=message):
        steps.program()


def test_damaged_texts_are_refused_or_read() -> None:
    """Reading a text never ends the process, whatever stands in it. (None of these is run.)"""
    generator = random.Random(0)
    words = TEXT.replace("\n", " \n ").split(" ")
    refused = 0
    for _ in range(20_000):
        made = list(words)
        for _ in range(generator.randint(1, 4)):
            place = generator.randrange(len(made))
            made[place] = generator.choice(
                [
                    generator.choice(words),
                    "",
                    "%99999999",
                    "$-1",
                    "[",
                    "]",
                    "some",
                    "-",
                    "=",
                    "\x00",
                ]
            )
        try:
            Program(" ".join(made), [torch.ones(3)])
        except (RuntimeError, UnicodeError):
            refused += 1
    assert refused > 10_000


@pytest.mark.parametrize(
    ("tensors", "sizes", "message"),
    [
        (1, 1, "expected 2 tensors and 1 sizes, got 1 and 1"),
        (2, 0, "expected 2 tensors and 1 sizes, got 2 and 0"),
    ],
)
def test_another_number_of_inputs_is_refused(tensors: int, sizes: int, message: str) -> None:
    program = Program(TEXT, [torch.ones(3)])
    with pytest.raises(RuntimeError, match=message):
        program(_inputs()[:tensors], [1] * sizes)


def test_an_operator_that_fails_is_named() -> None:
    program = Program(TEXT, [torch.ones(3)])
    with pytest.raises(RuntimeError, match="aten::linear fails"):
        program([torch.ones(4, 5), torch.ones(3, 2)], [1])


def test_division_by_zero_is_refused() -> None:
    program = Program("inputs 0 2 0\n$2 = / $0 $1\noutputs $2", [])
    with pytest.raises(RuntimeError, match="division by zero"):
        program([], [1, 0])


def test_many_threads_run_one_program() -> None:
    program, bias = Program(TEXT, [torch.ones(3)]), torch.ones(3)

    def run(number: int) -> None:
        x = torch.full((4, 2), float(number))
        for _ in range(200):
            tensors, sizes = program([x, torch.ones(3, 2)], [number])
            wanted = _wanted(x, torch.ones(3, 2), bias)
            assert sizes == [9 + number] and all(map(torch.equal, tensors, wanted))

    assert not errors_in_threads(run, range(4))


@pytest.mark.parametrize("arguments", ["%0 1.0", "%0 1.0 none none"])
def test_steps_of_ours_with_other_arguments_say_to_save_again(arguments: str) -> None:
    from oxytorch.program.check import check

    text = f"inputs 1 0 0\n%1 = oxytorch::softmax {arguments}\noutputs %1"
    with pytest.raises(ValueError, match="another version of oxytorch saved the file, save it aga"):
        check(text)
