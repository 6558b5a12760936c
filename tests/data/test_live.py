"""Live prompts: they are drawn once, once more for each feedback, expire, and are not used again by a resumed run."""

import io
import json
from pathlib import Path

import pytest
from data_cases import PLAIN
from tokenizers_for_tests import byte_tokenizer

from dapo.config import DataConfig
from dapo.config.data import LiveConfig
from dapo.data.live import LiveRows
from dapo.data.source import load_prompts
from dapo.data.template import PromptTemplate
from dapo.errors import DataError
from dapo.observe.run_folder import RunFolder
from run_cases import Recorder, run, steps_of, weights_hash

ROWS = [{"prompt": f"p{k}", "answer": k} for k in range(10)]


class Journal:
    def __init__(self, folder):
        self.file, self.clock, self.told = folder / "live.jsonl", 1000.0, []

    def add(self, name, time=None, **entry):
        with self.file.open("a") as out:
            out.write(json.dumps({"id": name, "time": self.clock if time is None else time, **entry}) + "\n")

    def rows(self, needs_answer=True, **keys):
        config = LiveConfig(path=str(self.file), expire_s=100, **keys)
        return LiveRows(config, needs_answer, self.told.append, lambda: self.clock)


@pytest.fixture
def journal(tmp_path):
    return Journal(tmp_path)


def taken(rows):
    return [(row.meta["id"], row.answer) for row in iter(rows.take, None)]


def test_a_prompt_waits_for_its_answer_and_each_feedback_is_used_once(journal):
    rows = journal.rows()
    assert taken(rows) == []  # there is no file yet
    journal.add("a", prompt="1+1?", answer=2)
    journal.add("b", prompt="2+2?", response="five")
    assert taken(rows) == [("a", "2")]
    journal.add("b", feedback={"edit": "four"})
    journal.add("b", feedback={"edit": "four"})  # sent twice
    journal.add("a", feedback={"thumbs": -1})
    assert taken(rows) == [("b", "four"), ("a", "2")] and taken(rows) == []
    journal.add("b", feedback={"thumbs": 1})
    [row] = iter(rows.take, None)
    assert (row.answer, row.meta["feedback"], row.meta["response"]) == ("five", {"thumbs": 1}, "five")
    assert rows.metrics()["live/feedback"] == 3 and rows.metrics()["live/drawn"] == 4


def test_a_file_is_read_when_it_has_changed(journal, monkeypatch):
    rows = journal.rows(needs_answer=False)
    journal.add("a", prompt="1?")
    with journal.file.open("a") as out:
        out.write('{"id": "b", "prompt": "' + "x" * 10**6)
    assert taken(rows) == [("a", None)]
    monkeypatch.setattr("dapo.data.live.parse_json", None)
    monkeypatch.setattr("dapo.data.live._AT_ONCE", None)  # would be added to
    assert rows.take() is None
    monkeypatch.undo()
    with journal.file.open("a") as out:
        out.write('"}\n')
    assert taken(rows) == [("b", None)]


def test_a_time_that_no_float_holds_is_a_bad_line(journal):
    journal.add("a", time=10**400, prompt="1?")
    assert taken(journal.rows(needs_answer=False)) == [] and "line 1: OverflowError" in journal.told[0]


def test_without_a_need_for_answers_a_prompt_is_drawn_at_once_and_again_with_what_came_of_it(journal):
    rows = journal.rows(needs_answer=False)
    journal.add("a", prompt=[{"role": "user", "content": "hi"}])
    assert taken(rows) == [("a", None)]
    journal.add("a", feedback={"outcome": 1})
    assert taken(rows) == [("a", "1")]


def test_what_is_stale_expires_prompts_and_feedback(journal):
    rows = journal.rows()
    journal.add("a", prompt="p", answer=1)
    journal.add("b", prompt="q")
    journal.clock += 101
    assert taken(rows) == []
    journal.add("b", feedback={"outcome": 3})
    journal.add("nobody", feedback={"outcome": 3})
    journal.add("c", prompt="r", answer=5)
    assert taken(rows) == [("c", "5")] and rows.metrics()["live/expired"] == 3


def test_half_a_line_is_left_for_later_and_bad_ones_are_named(journal):
    rows = journal.rows()
    journal.file.write_text('{"id": 1, "prompt": "p", "answer": 1}\n{broken}\n{"prompt": "no id"}\n[1]\n{"id": 2, "pro')
    assert taken(rows) == [("1", "1")]
    assert [text.partition(": it is")[0].split("live.jsonl: ")[1][:6] for text in journal.told] == [
        *("line 2", "line 3", "line 4")
    ]
    with journal.file.open("a") as out:
        out.write('mpt": "q", "answer": 2}\n')
    journal.add(2, prompt="again", answer=3)
    journal.add(3, prompt=7, answer=3)
    assert taken(rows) == [("2", "2")] and "there before" in journal.told[3] and "must be text" in journal.told[4]
    journal.file.write_text('{"id": 9, "prompt": "new", "answer": 9}\n')
    assert taken(rows) == [("9", "9")] and "read anew" in journal.told[-1]


def test_the_rest_of_a_line_that_is_written_while_it_is_read_is_no_line(journal, monkeypatch):
    half, rest = '{"id": 1, "pro', 'mpt": "p", "answer": 1}\n'

    class Grows(io.FileIO):
        def readinto(self, buffer, /):
            if not (count := super().readinto(buffer)):  # the end was seen
                io.FileIO(journal.file, "w").write((half + rest).encode())
            return count

    rows = journal.rows()
    journal.file.write_text(half)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", lambda path, mode: io.BufferedReader(Grows(path)))
        assert taken(rows) == []
    journal.file.write_text(half + rest)
    assert taken(rows) == [("1", "1")] and journal.told == []


def test_a_file_that_was_replaced_is_read_anew_and_one_that_cannot_be_read_is_named(journal):
    rows = journal.rows()
    journal.add("a", prompt="p", answer=1)
    assert taken(rows) == [("a", "1")]
    journal.file.rename(journal.file.with_suffix(".old"))  # as logs are rotated
    journal.add("long name", prompt="a longer prompt", answer=2)
    journal.add("b", prompt="q", answer=3)
    again = journal.rows()
    again.load_state(json.loads(json.dumps(rows.state())))  # a resumed run, too
    assert taken(rows) == taken(again) == [("long name", "2"), ("b", "3")] and "read anew" in journal.told[0]
    journal.file.write_bytes(b"")
    assert taken(rows) == taken(rows) == []
    journal.add("c", prompt="r", answer=4)
    assert taken(rows) == [("c", "4")]
    journal.file.unlink()
    journal.file.mkdir()
    with pytest.raises(DataError, match=r"data.live: .* Is a directory"):
        rows.take()


def test_a_large_file_is_read_piece_by_piece(journal):
    rows = journal.rows()
    with journal.file.open("w") as out:
        out.writelines(
            json.dumps({"id": k, "prompt": "p" * 500, "answer": k, "time": 1000}) + "\n" for k in range(3000)
        )
    assert rows.take().meta["id"] == "0" and 100 < rows.metrics()["live/waiting"] < 150
    assert [name for name, _ in taken(rows)] == [str(k) for k in range(1, 3000)]


def test_clocks_that_are_ahead_nesting_and_floods_of_feedback_are_bounded(journal):
    rows = journal.rows()
    with journal.file.open("a") as out:
        out.write('{"id": "deep", "prompt": ' + "[" * 30_000 + "\n")
    journal.add("never", time=float("nan"), prompt="p", answer=1)
    journal.add("ahead", time=1e12, prompt="p", answer=1)
    journal.clock += 50
    rows._read()
    journal.clock += 101
    assert taken(rows) == [] and rows.metrics()["live/expired"] == 2
    journal.add("a", prompt="p")
    for number in range(200):
        journal.add("a", feedback={"edit": str(number)})
    assert len(taken(rows)) == 100 and rows.metrics()["live/bad"] == 101


def test_the_source_draws_a_share_of_them_and_a_position_goes_on_where_it_was(journal):
    for k in range(30):
        journal.add(k, time=None, prompt=f"l{k}", answer=k)
    journal.add("long", prompt="x" * 200, answer=1)
    data = DataConfig(template="plain", live={"path": str(journal.file), "share": 0.5, "expire_s": 1e12})

    def fresh():
        return load_prompts(data, ROWS, PLAIN, warn=journal.told.append)

    source = fresh()
    first = [source.next() for _ in range(20)]
    live = [prompt for prompt in first if prompt.row >= 10]
    assert 4 < len(live) < 16 and [p.text for p in live] == [f"l{k}" for k in range(len(live))]
    assert len({p.row for p in live}) == len(live) and live[0].meta["source"] == "live"
    again = fresh()
    again.load_state(json.loads(json.dumps(source.state())))
    texts = [source.next().text for _ in range(80)]
    assert texts == [again.next().text for _ in range(80)] and "l29" in texts and "l0" not in texts


def test_rows_arrive_during_a_run_and_feedback_a_step_later_is_used_once(tmp_path: Path):
    def play(folder, stop=None, resume=False):
        file = tmp_path / f"{folder}.jsonl"

        def on_step(step):
            if step == 1:
                lines = [{"id": k, "prompt": f"{k}+1="} for k in range(3)]
            elif step == 2:
                lines = [{"id": k, "feedback": {"outcome": str(k + 1)}} for k in range(3)]
            else:
                lines = [{"id": 7, "prompt": "3+3=", "answer": "6"}]
            with file.open("a") as out:
                out.writelines(json.dumps(line) + "\n" for line in lines)

        keys = {"data.live": {"path": str(file), "share": 0.9}, "training.steps": stop or 5, "run.save_every": 1}
        keys |= {"reward": {"kind": "exact"}, "algorithm.filter_groups.enable": False}
        run(tmp_path / folder, keys, Recorder(on_step), reward=None, **resume_of(folder, resume))
        return [entry["live/drawn"] for entry in steps_of(tmp_path / folder)]

    def resume_of(folder, resume):
        return {"resume": RunFolder(tmp_path / folder)} if resume else {}

    drawn = play("whole")
    assert drawn == [0, 0, 3, 4, 4]  # at step 2 they wait for their feedback; id 7 comes twice
    play("two", stop=3)
    assert play("two", resume=True) == drawn
    assert weights_hash(tmp_path / "two/model-after") == weights_hash(tmp_path / "whole/model-after")


@pytest.mark.parametrize("prompt", ["1<|im_end|>+1?", [{"role": "user", "content": "1<|im_end|>+1?"}]])
def test_the_text_of_strangers_holds_no_control_token(journal, prompt):
    chat = "{% for m in messages %}{{ m.role + ': ' + m.content + '<|im_end|>' }}{% endfor %}"
    tokenizer = byte_tokenizer(eos="<|im_end|>", chat_template=chat)
    journal.add("a", prompt=prompt, answer=2)
    data = DataConfig(live={"path": str(journal.file), "share": 0.99, "expire_s": 1e12})
    source = load_prompts(data, ROWS, PromptTemplate(data, tokenizer), warn=journal.told.append)
    found = next(p for p in (source.next() for _ in range(30)) if p.row >= 10)
    assert found.token_ids.count(tokenizer.eos_token_id) == 1 and "1< |im_end|>+1?" in found.text
