"""The search space: parsing with its errors, grids and Sobol sequences."""

import pytest

from distribuuuu.commands.sweep.search_space import list_trials, parse_dimension, parse_space


def test_arguments_are_divided_into_fixed_and_swept_ones():
    words = ["OUT_DIR", "exp/lr=1", "OPTIM.BASE_LR=0.1, 0.2", "OPTIM.STEPS=[1, 2],[3]", "RNG_SEED", "3"]
    fixed, space, problems = parse_space([*words, "FINETUNE.LR_MULT.layer[12].*=log:1e-3:1"])
    assert fixed == ["OUT_DIR", "exp/lr=1", "RNG_SEED", "3"] and problems == []
    assert space["OPTIM.BASE_LR"].values == ("0.1", "0.2")
    assert space["OPTIM.STEPS"].values == ("[1, 2]", "[3]")
    assert (space["FINETUNE.LR_MULT.layer[12].*"].low, space["FINETUNE.LR_MULT.layer[12].*"].high) == (1e-3, 1.0)


WRONG = {
    "A.B=": "expected values a,b,c or a range", "A.B=1": "to fix a value, write KEY VALUE",
    "A.B=1,,2": "expected values a,b,c", "A.B=1,1": "expected values a,b,c", "A.B=log:1:1": "LOW < HIGH",
    "A.B=lin:nan:1": "LOW < HIGH", "A.B=lin:1:inf": "LOW < HIGH", "A.B=lin:a:b": "float",
    "A.B=int:1:2.5": "whole",
    "A.B=log:0:1": "LOW > 0", "A.B=lgo:1:2": "did you mean log?", "A.B=1,2 A.B=3,4": "is swept twice",
    "A.B=1,2 A.B 3": "is both fixed and swept", "RNG_SEED=1,2": "--seeds N", "OUT_DIR x": "no option is swept",
}  # fmt: skip


def test_a_wrong_space_is_explained():
    for words, message in WRONG.items():
        _, _, problems = parse_space(words.split())
        assert len(problems) == 1 and message in str(problems[0]), words


def test_a_grid_has_all_combinations_in_order():
    space = {"A": parse_dimension("1,2"), "B": parse_dimension("x,y,z")}
    trials = list_trials(space, None, seed=0)
    assert [(trial["A"], trial["B"]) for trial in trials] == [(a, b) for a in "12" for b in "xyz"]
    with pytest.raises(ValueError, match="at most 1,000"):
        list_trials(dict.fromkeys("ABCD", parse_dimension("1,2,3,4,5,6")), None, seed=0)


def test_a_sobol_sequence_covers_the_space_without_repetitions_and_depends_on_the_seed():
    texts = {"A": "log:1e-4:1", "B": "lin:-1:1", "C": "int:1:4", "D": "x,y"}
    space = {key: parse_dimension(text) for key, text in texts.items()}
    trials = list_trials(space, 32, seed=1)
    assert trials == list_trials(space, 32, seed=1) != list_trials(space, 32, seed=2)
    assert trials[:8] == list_trials(space, 8, seed=1)
    values = {key: [trial[key] for trial in trials] for key in space}
    for decade in range(4):
        assert sum(10 ** (decade - 4) <= float(value) < 10 ** (decade - 3) for value in values["A"]) == 8
    assert sum(float(value) < 0 for value in values["B"]) == 16
    assert [values["C"].count(number) for number in "1234"] == [8] * 4 and values["D"].count("x") == 16
    lists = {"A": parse_dimension("1,2,3")}
    with pytest.raises(ValueError, match="at most 3, the number of combinations"):
        list_trials(lists, 4, seed=0)
