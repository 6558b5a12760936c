"""``dapo data check``: what it counts, what it prints, its exit codes, and that a second check reads nothing."""

import json
from pathlib import Path

import pytest
from data_cases import PLAIN, items, write
from tokenizers_for_tests import CHAT, char_tokenizer
from typer.testing import CliRunner

import dapo.data.check
from dapo.commands import app
from dapo.config import DataConfig
from dapo.data.check import Lengths, Measure, check_data
from dapo.errors import DataError

SHARED = Path(__file__).parents[2].parent / "shared" / "data" / "math"
WORDS = [f"word{letter}" for letter in "abcdefghijklmnop"]


def rows(*prompts, answers=None):
    return [
        json.dumps({"prompt": p, "answer": a}) for p, a in zip(prompts, answers or range(len(prompts)), strict=True)
    ]


def run(*args):
    return CliRunner().invoke(app, ["data", "check", *map(str, args)], env={"COLUMNS": "200"})


@pytest.fixture
def files(tmp_path):
    text = " ".join(WORDS)
    first = write(
        tmp_path, *rows("one", "two", "two", "Three", answers=["1", "2", "zwei", "3"]), "{", '{"prompt": "no"}'
    )
    second = write(
        tmp_path, *rows("three", f"so {text}", answers=["3", "9"]), '{"prompt": "a", "answer": null}', name="b.jsonl"
    )
    held = write(tmp_path, *rows("ONE", f"{text} then", "else"), name="held.jsonl")
    return first, second, held


def test_it_counts_what_is_there(files):
    first, second, held = files
    found = check_data(items(first, second), items(held), DataConfig(max_prompt_length=3), Measure())
    one, two = found.train
    assert (one.rows, one.bad, one.missing_answers, one.duplicates, one.conflicts) == (6, 1, 1, 1, 1)
    assert one.faults[0].startswith(f"{first}:5: not valid JSON") and one.too_long is None
    assert (two.rows, two.bad, two.missing_answers, two.duplicates) == (3, 0, 1, 0)
    assert two.lengths.counts == {1: 2, 17: 1} and two.lengths.unit == "words"
    (pair,) = found.between
    assert (pair.file, pair.other, pair.exact, pair.conflicts) == (str(second), str(first), 1, 0)
    assert found.conflicts == [f"{first}:2 has '2', {first}:3 has 'zwei'"]
    assert [(p.file, p.exact, p.near) for p in found.overlap] == [(str(first), 1, 0), (str(second), 0, 1)]
    assert found.overlap[0].examples == [f"{first}:1 and {held}:1: the same prompt"]
    assert found.overlap[1].examples == [f"{second}:2 and {held}:2: both hold: {' '.join(WORDS[:13])}"]
    assert found.bad == 1 and found.doubts
    json.dumps(found.as_json())
    strict = check_data(items(second), [], DataConfig(), Measure(), answer_required=True)
    assert strict.train[0].bad == 1 and strict.train[0].faults[0].startswith(f"{second}:3: 'answer' is null")


def test_lengths_are_those_of_the_template(files):
    measure = Measure(lambda: PLAIN, "plain")
    found = check_data(items(files[0]), [], DataConfig(max_prompt_length=3), measure).train[0]
    assert found.lengths.unit == "tokens" and found.lengths.counts == {3: 3, 5: 1, 2: 1} and found.too_long == 1
    longer = check_data(items(files[0]), [], DataConfig(max_prompt_length=5), measure).train[0]
    assert longer.too_long == 0


def test_letters_that_the_tokenizer_lacks_are_told(tmp_path):
    file = write(tmp_path, *rows("caf\u00e9", "one", "\u00e9t\u00e9"))
    found = check_data(items(file), [], DataConfig(), Measure(lambda: PLAIN, "letters")).train[0]
    lost = (2, [f"{file}:1: '\u00e9'", f"{file}:3: '\u00e9'"])
    assert found.doubts == {"hold letters that the tokenizer has no token for": lost}


def test_a_second_check_reads_no_row(files, monkeypatch):
    def check(*named, held=files[2], **options):
        return check_data(items(*named), items(held), DataConfig(**options), Measure())

    first = check(*files[:2])
    read = []
    real = dapo.data.check._read_all
    monkeypatch.setattr(dapo.data.check, "_read_all", lambda *args: read.append(1) or real(*args))
    compared = []
    overlap = dapo.data.check.find_overlap
    monkeypatch.setattr(dapo.data.check, "find_overlap", lambda *args: compared.append(1) or overlap(*args))
    assert check(*files[:2]).as_json() == first.as_json() and not read and not compared
    check(*files[:2], answer_key="prompt2")
    assert len(read) == 3
    files[1].write_text(files[1].read_text() + "\n" + rows("new")[0])
    again = check(*files[:2])
    assert again.train[1].rows == 4 and len(read) == 4 and len(compared) == 2


def test_files_that_cannot_be_read_are_all_named(tmp_path, files):
    with pytest.raises(DataError) as caught:
        check_data(items(tmp_path / "a.jsonl", files[0]), items(tmp_path / "c.jsonl"), DataConfig(), Measure())
    assert len(str(caught.value).splitlines()) == 2


def test_histogram_and_quantiles():
    lengths = Lengths("words")
    lengths.counts.update({0: 1, 1: 2, 3: 4, 4: 1, 100: 2})
    assert lengths.histogram()[:4] == [(0, 0, 1), (1, 1, 2), (2, 3, 4), (4, 7, 1)]
    assert (
        lengths.histogram()[-1] == (64, 127, 2)
        and sum(n for _, _, n in lengths.histogram()) == lengths.counts.total() == 10
    )
    assert (lengths.at(0.5), lengths.at(0.8), lengths.at(0.81), lengths.at(1.0), lengths.above(3)) == (
        3,
        4,
        100,
        100,
        3,
    )
    assert Lengths("words").histogram() == [] and Lengths("words").at(0.5) == 0


# --- the command --------------------------------------------------------------------------------------------------


def test_bad_rows_are_exit_code_2_and_overlap_only_if_strict(tmp_path, files):
    first, second, held = files
    done = run(first, second, "--eval", held)
    assert done.exit_code == 2 and f"{first}:5: not valid JSON" in done.output
    assert "Length of training prompts in words, as no tokenizer was named" in done.output
    done = run(second, "--eval", held)
    assert done.exit_code == 0 and "0 equal and 1 similar prompts" in done.output
    assert run(second, "--eval", held, "--strict").exit_code == 2
    assert run(second, "--strict").exit_code == 0


def test_several_files_after_eval_and_settings(tmp_path, files):
    other = write(tmp_path, '{"q": "b", "answer": 1}', name="q.jsonl")
    out = tmp_path / "out" / "check.json"
    done = run(other, "--eval", other, "--eval", files[2], "--json", out, "data.prompt_key=q")
    assert done.exit_code == 2, done.output
    found = json.loads(out.read_text())
    assert [r["file"] for r in found["evaluation"]] == [str(other), str(files[2])]
    assert [r["bad"] for r in found["evaluation"]] == [0, 3] and found["overlap"][0]["exact"] == 1
    assert found["train"][0]["lengths"]["histogram"] == [[1, 1, 1]]


def test_a_recipe_gives_files_keys_tokenizer_and_reward(tmp_path, files):
    char_tokenizer(chat_template=CHAT).save_pretrained(tmp_path / "model")
    recipe = tmp_path / "r.yaml"
    recipe.write_text(
        f"model: {{path: {tmp_path}/model}}\ndata: {{train: b.jsonl, max_prompt_length: 30}}\n"
        "evaluation: {data: held.jsonl}\n"
    )
    done = run("--recipe", recipe)
    assert done.exit_code == 2 and "b.jsonl:3: 'answer' is null" in done.output  # the math reward compares with it
    assert "prompts in tokens (longer than 30: 1)" in done.output
    reward = ["reward.kind=function", "reward.function=x.y:z"]
    assert run("--recipe", recipe, *reward).exit_code == 0
    tokenizer = f"model.tokenizer={tmp_path}/model"
    named = run(files[2], tokenizer)
    framed = len("[user]else<e>[assistant]") - len("<e>") + 1  # the median of the three
    assert named.exit_code == 0 and f"{framed}" in named.output and "tokens: median" in named.output
    plain = run(files[2], tokenizer, "data.template=plain", "--json", tmp_path / "o.json")
    assert plain.exit_code == 0
    assert json.loads((tmp_path / "o.json").read_text())["train"][0]["lengths"]["histogram"][0] == [2, 3, 1]


def test_answers_that_are_whole_solutions_are_warned_of(tmp_path):
    """As a training would, which needs the reward for it: that of the recipe, or else the default."""
    solved = [{"question": f"What is {k}+{k}?", "answer": f"That is {2 * k}.\n#### {2 * k}"} for k in range(300)]
    file = write(tmp_path, "{", *map(json.dumps, solved))
    out = tmp_path / "o.json"
    done = run(file, "data.prompt_key=question", "--json", out)
    assert done.exit_code == 2 and "; 1 bad" in done.output  # the first line
    said = f"{file}: 199 of 199 answers are whole solutions, such as row 2: 'That is 0.\\n#### 0'; reward.kind=math"
    assert f"warning: {said}" in done.output and 'row["answer"].rpartition("####")[2].strip()' in done.output
    assert json.loads(out.read_text())["answers"][0].startswith(said)
    bare = write(tmp_path, *rows("What is 1+1?", "What is 2+2?", answers=["2", "4"]), name="bare.jsonl")
    done = run(bare, "--eval", file, "data.answer_key=answer", "--json", out)
    assert "warning" not in done.output and json.loads(out.read_text())["answers"] == []  # no row of it can be read
    fine = write(tmp_path, *map(json.dumps, solved), name="fine.jsonl")
    assert run(fine, "--strict", "data.prompt_key=question").exit_code == 0
    recipe = tmp_path / "r.yaml"
    recipe.write_text("model: {path: x}\nreward: {kind: function, function: x.y:z}\n")
    char_tokenizer(chat_template=CHAT).save_pretrained(tmp_path / "tokenizer")
    done = run(fine, "--recipe", recipe, "data.prompt_key=question", f"model.tokenizer={tmp_path}/tokenizer")
    assert done.exit_code == 0 and "whole solutions" not in done.output


def test_placeholders_are_told_unless_the_reward_does_not_compare(tmp_path):
    file = write(tmp_path, *rows("a?", "b?", "c?", answers=["notfound", "2", "nan"]))
    done = run(file)
    assert done.exit_code == 0
    said = "2 rows of rows.jsonl have a placeholder for an answer, such as\n  rows.jsonl:1: answer is 'notfound'\n"
    assert f"warning: {said}  rows.jsonl:3: answer is 'nan'" in done.output.replace(f"{tmp_path}/", "")
    assert "placeholder" not in run(file, "reward={kind: function, function: x.y:z}").output


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ([], "no files are named"),
        (["none.jsonl"], "none.jsonl: no such file"),
        (["x.jsonl", "data.prompt_kye=a"], "unknown key; did you mean data.prompt_key?"),
        (["x.jsonl", "data.template=fancy"], "data.template"),
        (["x.jsonl", "--recipe", "none.yaml"], "cannot read the recipe"),
    ],
)
def test_mistakes_are_named_without_a_traceback(args, said):
    done = run(*args)
    assert done.exit_code == 2 and said in " ".join(done.output.split()) and "Traceback" not in done.output


@pytest.mark.shared
def test_the_shared_files_hold_nothing_that_is_evaluated_on():
    train, held = sorted(SHARED.glob("train/*")), sorted(SHARED.glob("eval/*"))
    found = check_data(items(*train), items(*held), DataConfig(), Measure())
    assert sum(report.rows for report in found.train) == 53_445 and found.bad == 0
    assert sum(pair.exact for pair in found.overlap) == 0
    assert all(report.missing_answers == 0 for report in (*found.train, *found.evaluation))
