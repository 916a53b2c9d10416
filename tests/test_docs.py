"""Everything that the documentation names exists, and its sentences and those of docstrings name their subject."""

import ast
import functools
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

import alpa_lite
from alpa_lite import cli
from tests.test_house import KNOWN, ROOMS

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
INDEX = ROOT / "docs" / "index.md"
SOURCES = "\n".join(
    path.read_text(encoding="utf-8")
    for folder in ("alpa_lite", "passes", "runtime", "models", "gallery", "tests", "benchmarks")
    for path in sorted((ROOT / folder).rglob("*.py"))
)
WORDS = set(re.findall(r"\w+", SOURCES))
CLASSES: dict[str, list[str]] = {}
for _module, _path in KNOWN.items():
    for _name in re.findall(r"^class (\w+)\b", _path.read_text(), re.MULTILINE):
        CLASSES.setdefault(_name, []).append(_module)
BY_INSTANCE = {
    "plan": "alpa_lite.plan.plan.Plan",
    "step": "alpa_lite.api.ParallelStep",
    "nn": "flax.linen",
    "nnx": "flax.nnx",
    "ocp": "orbax.checkpoint",
    "model": "flax.nnx.Module",
    "manager": "alpa_lite.checkpoint.CheckpointManager",
    "found": "alpa_lite.checkpoint.RestoredCheckpoint",
}
"""The classes of the names that the documentation gives to its examples, and modules that have a short name there."""
FOREIGN = frozenset(
    (
        "tf.data", "as_numpy_iterator", "DataLoader", "collate_fn", "mark_stage_end", "sxstage_iter",
        "dcn_data_parallelism", "ici_fsdp_parallelism", "ici_tensor_parallelism",
        "jax_cross_host_transfer_socket_address",
        "jax_cross_host_transport_addresses", "supports_cross_host_transfers", "SystemExit",
    )
)  # fmt: skip
"""Names of other projects, none of which is installed, and of JAX and Python, which the code does not use."""


@functools.cache
def prose(page: Path) -> str:
    """A page without its blocks of code and its formulas."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"\$\$.*?\$\$|\$[^$\n]*\$", "", text, flags=re.DOTALL)
    return "\n".join(line for line in text.splitlines() if not line.startswith("    "))


@functools.cache
def spans(page: Path) -> list[str]:
    """The text between backticks."""
    return [span for span in re.findall(r"`([^`\n]+)`", prose(page)) if span not in FOREIGN]


@functools.cache
def exists(name: str) -> bool:
    """Whether a dotted name can be found: a module of the library, or an attribute of one, of a class or of JAX."""
    first, *rest = name.split(".")
    if first in BY_INSTANCE:
        return exists(".".join((BY_INSTANCE[first], *rest)))
    packages = ("passes", "ir", "cluster", "plan", "compilation", *(f"passes.{room}" for room in ROOMS))
    starts = ["", "alpa_lite.", *(f"alpa_lite.{package}." for package in packages)]
    if first[:1].isupper():
        return any(exists(f"{module}.{name}") for module in CLASSES.get(first, ()))
    for start in starts:
        parts = f"{start}{name}".split(".")
        for cut in range(len(parts), 0, -1):
            try:
                value = importlib.import_module(".".join(parts[:cut]))
            except ImportError:
                continue
            for part in parts[cut:]:
                value = getattr(value, "__dataclass_fields__", {}).get(part) or getattr(value, part, None)
                if value is None:
                    break
            else:
                return True
            break
    return False


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_files_exist(page: Path) -> None:
    files = [name for name in spans(page) if re.fullmatch(r"[\w./-]+(\.py|\.md|/)", name)]
    links = [link for link in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", prose(page)) if "://" not in link]
    missing = [name for name in files if not (ROOT / name).exists()]
    missing += [link for link in links if not (page.parent / link).exists()]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_dotted_names_exist(page: Path) -> None:
    names = [re.sub(r"\(.*\)$", "", span) for span in spans(page)]
    dotted = [name for name in names if re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+", name)]
    files = re.compile(r"\.(py|md|json|txt|toml)$")
    missing = [name for name in dotted if not files.search(name) and not exists(name)]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_identifiers_occur_in_the_code(page: Path) -> None:
    """A function, an argument or a class that is called otherwise now is no longer found."""
    called = [re.match(r"([A-Za-z_]\w*)\(", span) for span in spans(page)]
    names = {match[1] for match in called if match}
    names |= {span for span in spans(page) if re.fullmatch(r"[A-Za-z]\w*_\w+|_\w+|[A-Z][a-z]+\w*", span)}
    missing = sorted(names - WORDS)
    assert not missing


def lines_of_code(page: Path) -> list[str]:
    """The lines that a reader may type."""
    text = page.read_text(encoding="utf-8")
    fenced = re.findall(r"^```.*?^```$", text, flags=re.DOTALL | re.MULTILINE)
    lines = [line for line in text.splitlines() if line.startswith("    ")]
    return [line.strip() for line in (*lines, *"\n".join(fenced).splitlines(), *spans(page))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_make_targets_exist(page: Path) -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    used = [re.match(r"(?:\w+=\S+ )?make ((?:[\w-]+ ?)+)(?:\s|$|\w+=)", line) for line in lines_of_code(page)]
    named = {name for match in used if match for name in match[1].split() if name.islower()}
    missing = sorted(named - targets)
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_and_their_options_exist(page: Path) -> None:
    commands = typer.main.get_command(cli.app).commands  # type: ignore[attr-defined]
    for line in lines_of_code(page):
        match = re.match(r"alpa-lite ([a-z]+)(.*)", line)
        if match is None:
            continue
        assert match[1] in commands, line
        known = {option for parameter in commands[match[1]].params for option in parameter.opts}
        given = re.findall(r"(?<!\S)(--?[a-z][\w-]*)", match[2].split("#")[0].split(" -- ")[0])
        assert not set(given) - known - {"-h", "--help"}, line


def test_every_room_has_its_place_on_the_first_page() -> None:
    text = INDEX.read_text(encoding="utf-8")
    positions = [text.find(f"`passes/{room}/`") for room in ROOMS]
    assert min(positions) >= 0
    for page in (ROOT / "docs").glob("*.md"):
        assert page == INDEX or f"({page.name})" in text, page.name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_lines_are_not_too_long(page: Path) -> None:
    """Rows of tables and addresses cannot be broken."""
    lines = page.read_text(encoding="utf-8").splitlines()
    assert not [line for line in lines if len(line) > 120 and not line.startswith(("|", "    ")) and "](" not in line]


def test_the_reference_has_every_public_name() -> None:
    pages = "\n".join(page.read_text(encoding="utf-8") for page in sorted((ROOT / "docs" / "reference").glob("*.md")))
    shown = set(re.findall(r"^::: alpa_lite\.(\w+)$", pages, re.MULTILINE))
    assert shown == {name for name in alpa_lite.__all__ if not name.startswith("__")}


RELATIVE = re.compile(r"(?:^|(?<=[.!?:])\s+)(What|That which|Whatever|Of several)\b")
"""How no sentence of a docstring or page begins."""


def docstrings(path: Path) -> Iterator[tuple[int, str]]:
    """(line, text) of the docstrings of a module, its classes, functions and constants."""
    for node in ast.walk(ast.parse(path.read_text())):
        body = getattr(node, "body", None)
        for one in body if isinstance(body, list) else ():
            match one:
                case ast.Expr(value=ast.Constant(value=str(text))):
                    yield one.lineno, text.strip()


def first_sentence(text: str) -> str:
    return re.split(r"(?<=[.:])\s", " ".join(text.split("\n\n")[0].split()), maxsplit=1)[0]


@pytest.mark.parametrize("name", sorted(KNOWN))
def test_docstrings_name_their_subject(name: str) -> None:
    """No first sentence has a relative clause with "what", and no sentence begins with one."""
    for line, text in docstrings(KNOWN[name]):
        where = f"{KNOWN[name].relative_to(ROOT)}:{line}: {first_sentence(text)}"
        assert not RELATIVE.search(text), where
        assert not re.search(r"\bwhat\b", first_sentence(text)), where


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_sentences_of_pages_name_their_subject(page: Path) -> None:
    """Questions may begin with "What"."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for paragraph in text.split("\n\n"):
        if paragraph.startswith(("#", "|", "    ")):
            continue
        for sentence in re.split(r"(?<=[.!?:])\s+(?=[A-Z])", " ".join(paragraph.split())):
            assert not (RELATIVE.match(sentence) and not sentence.endswith("?")), f"{page.name}: {sentence}"


EVERYDAY = re.compile(
    r"\b(heeded|lies?|anew|beside|born|told|whatever|so many)\b|(?<!there) is no (?!longer)", re.IGNORECASE
)
"""Words of errors, notes and reports that have a technical form, such as "is placed" for "lies"."""

INGREDIENTS = {"heeded", "state gathered anew for late uses"}
"""Texts that fingerprints of stored plans are made of."""


@pytest.mark.parametrize("name", sorted(KNOWN))
def test_messages_use_technical_words(name: str) -> None:
    tree = ast.parse(KNOWN[name].read_text())
    texts = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        match node:
            case ast.Constant(value=str(text)) if id(node) not in texts and text not in INGREDIENTS:
                assert not EVERYDAY.search(text), f"{KNOWN[name].relative_to(ROOT)}:{node.lineno}: {text}"


BARE = re.compile(
    r"(?!(?:ceiling|conditioning|heading|padding|resharding|sharding)$)[a-z0-9]+(ed|ing)|"
    "made|known|found|kept|given|taken|lost|held|sent|said|seen|written|paid|learnt|"
    "of|by|in|on|at|to|under|over|within|beside|beyond|behind|before|after|inside|outside|through|down|with|without|"
    "now|once|apart|ahead|only|alone|whole|flat|single|plain|fresh|free|further|special|light|late|equal"
)
"""Names that are a participle, a preposition, an adverb or an adjective; some words in -ing are nouns."""
FILES = ("plan.", "cluster.", "calibration.", "checkpoint.files", "ir.timeline")
"""Modules whose fields are keys of files, which other classes may have, too."""
FOREIGN_FIELDS = ("_jax.", "ir.kernels", "ir.notation")
"""Modules whose fields are as JAX has them, or are parts of the keys of operations, of which plans hold digests."""
SWITCHES = {"tied"}
"""Fields of models that command lines and stored cases set by name."""


def classes_of(name: str) -> list[ast.ClassDef]:
    return [node for node in ast.walk(ast.parse(KNOWN[name].read_text())) if isinstance(node, ast.ClassDef)]


def fields_of(node: ast.ClassDef) -> dict[str, str]:
    """Field -> its type; those that begin with an underscore are private."""
    found = [f for f in node.body if isinstance(f, ast.AnnAssign) and isinstance(f.target, ast.Name)]
    fields = {ast.unparse(f.target): ast.unparse(f.annotation) for f in found}
    return {field: kind for field, kind in fields.items() if not field.startswith("_")}


@functools.cache
def stored_fields() -> frozenset[str]:
    names = [name for name in KNOWN if name.removeprefix("alpa_lite.").startswith(FILES)]
    return frozenset(field for name in names for node in classes_of(name) for field in fields_of(node))


def is_named_by_type(name: str, kind: str) -> bool:
    """Whether the value is one of, or several of, the class of that name, such as `traced: Traced`."""
    return re.search(rf"\b{name.capitalize()}", kind) is not None


NOUNS = {"Grouping", "Layering", "Setting", "Free"}
"""Classes whose names are nouns in spite of their ends, and the instruction that frees a buffer."""
CUSTOMARY = {"Traced", "Lowered", "Compiled", "Auto", "Off", "Sharded"} | {
    "Staged",
    "Nested",
    "Accumulated",
    "Replicated",
}
"""The words of `jax.stages` and the public methods; then participles that have no noun yet."""


@pytest.mark.parametrize("name", sorted(KNOWN))
def test_classes_are_named_by_nouns(name: str) -> None:
    words = (node.name for node in classes_of(name) if re.fullmatch(r"[A-Z][a-z]+", node.name))
    adjectives = re.compile(rf"{BARE.pattern}|own|off|auto|left|spent|invalid|opaque|divisible|infeasible")
    bare = {word for word in words if adjectives.fullmatch(word.lower())}
    assert bare <= NOUNS | CUSTOMARY


@pytest.mark.parametrize("name", sorted(KNOWN))
def test_functions_are_named_by_verbs_or_nouns(name: str) -> None:
    functions = (node for node in ast.parse(KNOWN[name].read_text()).body if isinstance(node, ast.FunctionDef))
    assert not [function.name for function in functions if BARE.fullmatch(function.name)]


@pytest.mark.parametrize("name", sorted(KNOWN))
def test_methods_and_fields_are_named_by_verbs_or_nouns(name: str) -> None:
    """A property that is true or false is named by a predicate, and `ok` is that of results, as of responses."""
    for node in classes_of(name):
        for method in (m for m in node.body if isinstance(m, ast.FunctionDef) and not m.name.startswith("_")):
            kind, decorators = ast.unparse(method.returns or ast.Constant("")), map(ast.unparse, method.decorator_list)
            where = f"{node.name}.{method.name}"
            assert not BARE.fullmatch(method.name) or is_named_by_type(method.name, kind), where
            if kind == "bool" and {"property", "cached_property"}.intersection(decorators):
                assert re.fullmatch(r"ok|(is|has|can|may|[a-z]+s)_\w+", method.name), where
        if not name.removeprefix("alpa_lite.").startswith((*FILES, *FOREIGN_FIELDS)):
            for field, kind in fields_of(node).items():
                is_known = field in stored_fields() | SWITCHES or is_named_by_type(field, kind)
                assert not BARE.fullmatch(field) or is_known, f"{node.name}.{field}"


CALLERS = [
    "OptionError",
    "SignatureError",
    "RuleError",
    "TracingError",
    "CheckpointError",
    "MicrobatchError",
    "ProcessError",
]
REMEDY = re.compile(
    r"\b(allow|call|change|check|choose|close|convert|count|end|give|install|leave|let|list|look|make|must|name|needs?|"
    r"pass|place|plan|recompute|remove|rename|restore|return|run|save|set|start|take|try|use|write)\b|remedy|hint",
    re.IGNORECASE,
)
"""Verbs of remedies, and names of variables that hold one."""


@pytest.mark.parametrize("name", sorted(KNOWN))
def test_errors_for_callers_say_what_to_do(name: str) -> None:
    for node in ast.walk(ast.parse(KNOWN[name].read_text())):
        match node:
            case ast.Raise(exc=ast.Call(func=ast.Name(id=error), args=[ast.JoinedStr() | ast.Constant() as text, *_])):
                message = ast.unparse(text)
                assert error not in CALLERS or REMEDY.search(message), message
