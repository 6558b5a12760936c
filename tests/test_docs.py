"""What the documents show is run as it stands there, and what they name exists.

A page is a session: its blocks run from top to bottom, in one folder that holds a model such as the demo's. ``python``
blocks share their names; each line of an ``sh`` block is a ``dapo`` command, which has to end as its comment says
(``# exit code 2``) or else well; ``yaml`` blocks are recipes. A block of Python or YAML whose first line names a file
(``# my_reward.py``) is written to that file, too.

What cannot run here says why, in a comment above the block: ``<!-- not run: needs the network -->``.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import inspect
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import transformers
import typer.main
import yaml
from typer.testing import CliRunner

from dapo.commands import app
from dapo.commands.demo.task import make_model, make_tokenizer
from dapo.commands.shared.errors import EXIT_CODES
from dapo.config import TrainingConfig, all_keys, build_config, load_config, warnings_for
from dapo.config.messages import nearest_key
from dapo.config.on_resume import (
    BETWEEN_STEPS,
    BY_CONTENT,
    FIXED,
    FROM_THE_NEXT_STEP,
    MAY_CHANGE,
    MAY_CHANGE_UNLESS_DETERMINISTIC,
)
from dapo.config.reference import all_values
from dapo.config.stages import STAGES, build_stage
from dapo.model.loading import load_model
from dapo.observe.metrics import describe
from dapo.stages.phases import load_phases
from dapo.stages.sft import imitate
from dapo.training.trainer import Trainer

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES = [
    page for page in DOCUMENTS if page.parent.name != "decisions"
]  # decisions tell what was so when they were made

NOT_RUN = {
    "docs/alignment.md": 2,
    "docs/data.md": 1,
    "docs/quickstart.md": 4,
    "docs/models.md": 1,
    "docs/rewards.md": 2,
    "docs/serving.md": 6,
    "docs/trackers.md": 1,
    "docs/vllm.md": 1,
}
"""How many blocks of each page cannot run here. Whoever adds one has to come by."""


def _name(document: Path) -> str:
    return str(document.relative_to(ROOT))


# --- what is shown ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Block:
    """A fenced block: where its text starts, what it is, and why it is not run (empty: it is)."""

    place: str
    line: int
    language: str
    text: str
    not_run: str

    @property
    def file(self) -> str | None:
        """The file that the block is."""
        found = re.match(r"# ([\w-]+\.(?:py|yaml))\n", self.text)
        return found[1] if found else None

    def commands(self) -> Iterator[str]:
        """Its lines; those that end with a backslash go on in the next one."""
        for line in re.sub(r"\\\n\s*", "", self.text).splitlines():
            if line.strip() and not line.lstrip().startswith("#"):
                yield line.strip()


def _blocks(document: Path) -> list[Block]:
    text = document.read_text(encoding="utf-8")
    fence = re.compile(r"(?:^<!-- not run: (.+?) -->\n)?^```([\w+-]*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
    return [
        Block(_name(document), text[: m.start(3)].count("\n") + 1, m[2], m[3], m[1] or "") for m in fence.finditer(text)
    ]


def _runs(block: Block) -> bool:
    return block.language in ("python", "sh", "yaml") and not block.not_run


class Session:
    """What a reader does who types a page in."""

    def __init__(self) -> None:
        self._names: dict[str, Any] = {"__name__": "__main__"}

    def do(self, block: Block) -> None:
        if block.file and block.language != "sh":
            Path(block.file).write_text(block.text, encoding="utf-8")
        {"python": self._python, "sh": self._shell, "yaml": self._recipe}[block.language](block)

    def _python(self, block: Block) -> None:
        # line ends in front, so that a traceback names the line of the page
        exec(compile("\n" * (block.line - 1) + block.text, f"<{block.place}>", "exec"), self._names)

    def _shell(self, block: Block) -> None:
        for command in block.commands():
            program, *arguments = shlex.split(command, comments=True)
            assert program == "dapo", f"{block.place}:{block.line}: {command}: only dapo commands are run here"
            wanted = re.search(r"# exit code (\d+)", command)
            done = CliRunner().invoke(app, arguments)
            assert done.exit_code == (int(wanted[1]) if wanted else 0), (
                f"{block.place}:{block.line}: {command}\n{done.output}"
            )

    def _recipe(self, block: Block) -> None:
        tree = yaml.safe_load(block.text)
        if "phases" in tree:
            load_phases(str(block.file))
        elif "stage" in tree:
            build_stage(tree["stage"], tree)
        else:
            build_config({"model": {"path": "model"}} | tree)


@pytest.fixture(scope="module")
def demo_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's model before training, but for what takes minutes: it answers at once, with any digit."""
    tokenizer, folder = make_tokenizer(), tmp_path_factory.mktemp("model")
    settings = TrainingConfig(weight_decay=0.0, tokens_per_micro_batch=8192)
    trainer = Trainer(load_model(make_model(0, len(tokenizer))), settings, temperature=1.0)
    prompts = [tokenizer.encode(f"{a}*{b}+3=") for a in range(10) for b in range(10)]
    for update in range(25):
        answers = [
            [*tokenizer.encode(f"#{(7 * i + update) % 10}"), tokenizer.eos_token_id] for i in range(len(prompts))
        ]
        imitate(trainer, zip(prompts, answers, strict=True), 3e-3)
    trainer.save(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("document", [d for d in DOCUMENTS if any(map(_runs, _blocks(d)))], ids=_name)
def test_a_page_does_what_it_shows(
    document: Path, demo_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(demo_model, tmp_path / "runs/cpu-demo/model-before")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)  # as in a notebook there
    monkeypatch.delitem(sys.modules, "checker", raising=False)
    monkeypatch.setenv("DAPO_CACHE", str(tmp_path / "cache"))
    session = Session()
    for block in filter(_runs, _blocks(document)):
        session.do(block)


def test_blocks_that_are_not_run_are_counted_and_say_why() -> None:
    found = {_name(page): sum(bool(block.not_run) for block in _blocks(page)) for page in DOCUMENTS}
    assert {page: count for page, count in found.items() if count} == NOT_RUN


def _shown_commands(document: Path) -> Iterator[str]:
    """Commands of blocks that are not run, and of running text."""
    for block in _blocks(document):
        if not _runs(block):
            yield from (line for line in block.commands() if line.startswith("dapo "))
    text = re.sub(r"^```.*?^```$", "", document.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    yield from (command.replace("\n", " ") for command in re.findall(r"`(dapo [^`]+)`", text))


@pytest.mark.parametrize("document", PAGES, ids=_name)
def test_commands_and_options_that_are_shown_exist(document: Path) -> None:
    for line in _shown_commands(document):
        command: Any = typer.main.get_command(app)
        words = shlex.split(line.replace("'", ""), comments=True)[1:]
        while words and hasattr(command, "commands") and not words[0].startswith("-"):
            assert words[0] in command.commands, f"{document.name}: {line}: there is no command {words[0]}"
            command = command.commands[words.pop(0)]
        known = {option for parameter in command.params for option in parameter.opts} | {"--help", "-h"}
        for option in (word.partition("=")[0] for word in words if word.startswith("-") and word != "-"):
            assert option in known, f"{document.name}: {line}: there is no option {option}"


# --- what is named ------------------------------------------------------------------------------------------------


LINK = r"\]\((?!https?://)([^)#]+)"
NAMED_FILE = r"`((?:[\w-]+/)+[\w-]+\.(?:py|yaml|md))(?::[^`]*)?`"


def _named_key() -> str:
    sections = "|".join({key.partition(".")[0] for key in all_values() if "." in key})
    return rf"`((?:{sections})\.[\w.]+)(?:=[^`]*)?`"


@pytest.mark.parametrize("document", DOCUMENTS, ids=_name)
def test_links_and_files_that_are_named_exist(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    for target in re.findall(LINK, text):
        assert (document.parent / target).exists(), f"{document.name} links to {target}"
    # module paths in code type, such as `training/packing.py`, are looked up in the package and the repository
    for name in re.findall(NAMED_FILE, text):
        places = [ROOT / "src/dapo" / name, ROOT / "src" / name, ROOT / name]
        assert any(place.exists() for place in places), f"{document.name} names {name}"


def _anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=_name)
def test_links_lead_to_headings_that_exist(document: Path) -> None:
    for name, anchor in re.findall(r"\]\((?!https?://)([^)#\s]*)#([^)\s]+)\)", document.read_text(encoding="utf-8")):
        target = document.parent / name if name else document
        assert target.suffix != ".md" or anchor in _anchors(target), f"{document.name} links to {name}#{anchor}"


def test_the_patterns_find_what_they_look_for() -> None:
    """Over all pages; each of the tests here would pass with one that finds nothing."""
    texts = [page.read_text(encoding="utf-8") for page in PAGES]
    assert sum(len(list(_shown_commands(page))) for page in PAGES) > 50
    assert sum(len(re.findall(LINK, text)) for text in texts) > 20
    assert sum(len(re.findall(NAMED_FILE, text)) for text in texts) > 5
    assert sum(len(re.findall(_named_key(), text)) for text in texts) > 50


def _is_key(name: str) -> bool:
    """Whether ``name`` is a key of the config, or a section."""
    keys = [*all_values(), *(key for stage in STAGES.values() for key in all_keys(stage))]
    return any(key == name or key.startswith(f"{name}.") for key in keys)


@pytest.mark.parametrize("document", PAGES, ids=_name)
def test_keys_that_are_named_exist(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    if document.name == "coming-from.md":  # a table's other columns are the other systems' names
        text = re.sub(r"^(\|[^|]*\|).*", r"\1", text, flags=re.MULTILINE)
    for name in re.findall(_named_key(), text):
        of_runtime = document.name == "configuration.md" and _is_key(f"runtime.{name}")
        assert _is_key(name) or of_runtime or name.endswith((".json", ".jsonl", ".safetensors")), (
            f"{document.name} names {name}"
        )


def _tables(text: str) -> Iterator[dict[str, str]]:
    """The rows of all tables, as header -> cell."""
    header: list[str] = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if not cells:
            header = []
        elif not header:
            header = cells
        elif not all(re.fullmatch(r":?-+:?", cell) for cell in cells):
            yield dict(zip(header, cells, strict=True))


def _code(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def _function(name: str) -> Any:
    """What ``module:function`` or ``module:Class.method`` names, below ``dapo``."""
    module, _, path = name.partition(":")
    found: Any = importlib.import_module(f"dapo.{module}")
    for part in path.split("."):
        found = getattr(found, part)
    return found


PAPER = list(_tables((ROOT / "docs/paper.md").read_text(encoding="utf-8")))


def test_the_paper_is_mapped_to_functions_keys_and_metrics_that_exist() -> None:
    mapped = [row for row in PAPER if "function" in row]
    named = {kind: [name for row in mapped for name in _code(row[kind])] for kind in ("function", "key", "metric")}
    for name in named["function"]:
        assert callable(_function(name)), name
    assert [name for name in named["key"] if not _is_key(name.partition("=")[0])] == []
    assert [name for name in named["metric"] if describe(name) is None] == []
    assert all(len(names) > 10 for names in named.values())


def test_every_equation_of_the_paper_is_on_its_page_and_named_where_it_is_computed() -> None:
    rows = {row["paper"]: row for row in PAPER if row.get("paper", "").startswith("Eq. ")}
    assert {int(re.findall(r"\d+", name)[0]) for name in rows} == {5, 7, 8, 9, 10, 11, 12, 13}
    for name, row in rows.items():
        number = re.findall(r"\d+", name)[0]
        documents = [inspect.getdoc(_function(function)) or "" for function in _code(row["function"])]
        assert any(re.search(rf"Eq\. (\d+(, | and ))*{number}\b", text) for text in documents), name


def test_settings_in_the_page_on_the_paper_are_as_the_config_has_them() -> None:
    config = build_config({"model": {"path": "model"}})
    rows = [row for row in PAPER if "default" in row]
    assert len(rows) > 10
    for row in rows:
        (key,) = _code(row["key"])
        found: Any = config
        for part in key.split("."):
            found = getattr(found, part)
        assert found == pytest.approx(yaml.safe_load(_code(row["default"])[0])), key


def test_the_page_on_runs_says_what_may_change_on_resume() -> None:
    text = (ROOT / "docs/runs.md").read_text(encoding="utf-8")
    said = [set(_code(row["keys"])) for row in _tables(text) if "what may change" in row]
    may = [MAY_CHANGE, FROM_THE_NEXT_STEP, BETWEEN_STEPS, MAY_CHANGE_UNLESS_DETERMINISTIC, BY_CONTENT]
    assert said == list(map(set, may))
    refused = {row["because"]: set(_code(row["refused"])) for row in _tables(text) if "refused" in row}
    assert refused == {why: set(keys) for why, keys in FIXED.items()}


def test_the_page_on_runs_has_the_exit_codes() -> None:
    text = (ROOT / "docs/runs.md").read_text(encoding="utf-8")
    said = [code for row in _tables(text) if "exit code" in row for code in row["exit code"].split(", ")]
    assert said == re.findall(r"\b\d+\b(?: \+ n)?", EXIT_CODES)


# --- reference pages and recipes ----------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", sorted((ROOT / "recipes").glob("*.yaml")), ids=lambda r: r.name)
def test_shipped_recipes_are_valid(recipe: Path) -> None:
    assert warnings_for(load_config(recipe)) == []


@pytest.mark.parametrize("page", ["configuration.md", "metrics.md"])
def test_reference_pages_are_what_the_code_says(page: str) -> None:
    spec = importlib.util.spec_from_file_location("make_docs", ROOT / "scripts/make_docs.py")
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert (ROOT / "docs" / page).read_text(encoding="utf-8") == script.PAGES[page](), "run scripts/make_docs.py"


# --- the first page, and the page for those who come from elsewhere ---------------------------------------------------


def test_the_first_page_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) < 900


def _page(name: str) -> str:
    return (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")


def test_figures_of_the_first_page_are_those_of_the_pages_that_it_links_to() -> None:
    text = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    cycle = re.search(r"takes \*\*([\d.]+) s; TRL [\d.]+ with vLLM [\d.]+ takes ([\d.]+) s\*\*", text)
    assert cycle and re.search(
        rf"\*\*cycle\*\* \| \*\*{cycle[1]}0?\*\* \| [\d.]+ \| \*\*{cycle[2]}\*\*", _page("performance")
    )
    ratios = re.search(r": ([\d.]+) times, or ([\d.]+) times if both recompute", text)
    assert ratios and f"**{ratios[1]} times as fast**" in _page("performance")
    assert f"it is {ratios[2]} times" in " ".join(_page("performance").split())
    learned = re.search(r"from ([\d.]+%) to ([\d.]+%) and ([\d.]+%) of GSM8K", text)
    assert learned and all(f"{value}" in _page("results") for value in learned.groups())
    assert all(
        re.search(rf"\| seed \d \| {learned[1]} .*\*\*{end}\*\*", _page("results")) for end in learned.groups()[1:]
    )


def test_names_elsewhere_for_asynchronous_training_are_answered_with_ours() -> None:
    rows = [row for row in _tables(_page("coming-from")) if "elsewhere" in row]
    assert len(rows) > 8
    for row in rows:
        ours = next(name for name in _code(row["here"]) if "." in name)
        for name in set(_code(row["elsewhere"])) - {"token", "sequence"}:
            assert ours in nearest_key(name), f"{name}: {nearest_key(name)}"


def test_names_elsewhere_of_the_table_of_keys_are_answered_with_ours() -> None:
    rows = re.findall(r"^\| `([^`]+)`[^|]*\|([^|]*)\|([^|]*)\|([^|]*)\|$", _page("coming-from"), re.M)
    rows = [(ours, [set(re.findall(r"`(?:--)?([a-z_.]+)`", cell)) for cell in cells]) for ours, *cells in rows]
    names = {(ours, *cell) for ours, cells in rows for cell in cells if len(cell) == 1}  # no products, no values
    asked = {(ours, name) for ours, name in names if "_" in name or "." in name}
    assert len(asked) > 50
    assert {(ours, name) for ours, name in asked if ours not in nearest_key(name)} == {
        ("algorithm.overlong_buffer.len", "get_soft_overlong_punishment"),  # a function
        ("training.tokens_per_micro_batch", "per_device_train_batch_size"),  # in samples, which ours are not
    }


def test_names_of_the_other_systems_and_ours_exist() -> None:
    trl = pytest.importorskip("trl")
    known = {field.name for field in dataclasses.fields(trl.GRPOConfig)}
    known |= set(inspect.signature(trl.GRPOTrainer).parameters) | set(
        inspect.signature(transformers.Trainer.train).parameters
    )
    known |= set(dir(importlib.import_module("trl.rewards")))
    rows = re.findall(r"^\| (`[^|]+)\|([^|]*)\|[^|]*\|[^|]*\|$", _page("coming-from"), re.M)
    assert len(rows) > 30
    values = {
        "dapo",
        "grpo",
        "dr_grpo",
        "cispo",
        "sequence",
        "group",
        "none",
        "prompt",
        "GRPOTrainer",
        "linear",
        "truncate",
        "token_truncate",
        "k2",
    }
    for ours, theirs in rows:
        keys = re.findall(r"`([a-z_]+\.[\w.]+)", ours)
        assert (keys or "`dapo " in ours) and all(key in all_values() for key in keys), ours
        for name in re.findall(r"`(\w+)`", theirs):
            assert name in known | values, f"TRL has no {name}"
