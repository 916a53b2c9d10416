"""The command line: every command, on the smallest model."""

import dataclasses
import json
import re
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from alpa_lite.cli import app
from alpa_lite.cluster import Cluster
from alpa_lite.plan.plan import Plan
from tests.plans import gpt_plan, small_plan

runner = CliRunner()


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "plan.json"
    gpt_plan().save(path)
    return str(path)


def printed_lines(*args: str | Path) -> list[str]:
    return [line.rstrip() for line in invoke(*args).rstrip().splitlines()]


def test_show_explain_and_diff_print_texts_of_the_plan(file: str, tmp_path: Path) -> None:
    plan, other = gpt_plan(), tmp_path / "other.json"
    small_plan().save(other)
    saved = dataclasses.replace(plan, planning_seconds={})  # which a file does not hold
    assert printed_lines("show", file) == str(plan).splitlines()
    assert printed_lines("show", file, "--full") == saved.details().splitlines()
    name = "params/h_3/mlp/up/kernel"
    assert invoke("explain", file, name).rstrip() == plan.explain(name)
    assert invoke("diff", file, other).rstrip() == plan.diff(small_plan())


def test_clusters_lists_every_preset() -> None:
    printed = invoke("clusters")
    assert set(Cluster.preset_names()) <= set(re.findall(r"[\w.-]+", printed))
    assert max(map(len, printed.splitlines())) <= 100


def losses_in(printed: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"^step +\d+  loss ([\d.]+)", printed, re.MULTILINE)]


SMALL = ("--size", "tiny", "--batch", "8", "--set", "layers=1", "--set", "seq=16", "--set", "hidden=32")


@pytest.mark.slow
def test_plan_train_show_explain_and_diff_work_together(tmp_path: Path) -> None:
    auto, data, text = tmp_path / "auto.json", tmp_path / "data.json", tmp_path / "text.txt"
    text.write_text("to be or not to be, that is the question. " * 50)

    planned = invoke("plan", "gpt", "--cluster", "local", *SMALL, "--method", "data", "-o", data)
    assert "DataParallel" in planned or "data" in planned.splitlines()[0]
    assert planned.rstrip().endswith(f"saved to {data}")

    trained = invoke(
        "train", "gpt", *SMALL, "--devices", "2", "--steps", "12", "--text", text, "--memory", "1", "-o", auto
    )
    losses = losses_in(trained)
    assert len(losses) == 12
    assert losses[-1] < losses[0]
    assert "12 steps" in trained

    for file, devices in ((auto, 2), (data, 8)):
        lines = invoke("show", file).splitlines()
        assert max(map(len, lines)) <= 100
        assert f"{devices} devices" in lines[1]
        assert not any("site-packages" in line or str(Path(__file__).parent) in line for line in lines)
    explained = invoke("explain", auto, "tokens/embedding")
    assert explained.startswith("state/params/tokens/embedding\n")
    assert "state/opt_state/0/{mu,nu}/tokens/embedding\n" in explained
    compared = invoke("diff", data, auto)
    assert "method" in compared
    assert invoke("diff", data, data).strip() == "The plans do not differ."

    replayed = invoke("train", "gpt", *SMALL, "--devices", "2", "--steps", "12", "--text", text, "--plan", auto)
    assert "replayed" in replayed
    assert losses == losses_in(replayed)


@pytest.mark.slow
def test_pipelines_are_planned_simulated_trained_and_traced(tmp_path: Path) -> None:
    file, simulated, traced = tmp_path / "plan.json", tmp_path / "simulated.json", tmp_path / "traced.json"
    split = ["--stages", "2", "--microbatches", "2", "--schedule", "gpipe"]
    printed = invoke("plan", "gpt", "--cluster", "local", *SMALL, *split, "-o", file, "--simulate", simulated)
    assert "2 stages, 2 micro-batches, schedule gpipe" in printed
    assert str(simulated) in printed
    processes = [e for e in json.loads(simulated.read_text())["traceEvents"] if e["name"] == "process_name"]
    assert [e["args"]["name"] for e in processes] == ["predicted"]

    trained = invoke("train", "gpt", *SMALL, "--steps", "4", "--plan", file, "--trace", traced)
    assert len(losses_in(trained)) == 4
    names = [e["args"]["name"] for e in json.loads(traced.read_text())["traceEvents"] if e["name"] == "process_name"]
    assert names == ["executed", "predicted"]


@pytest.mark.slow
def test_the_demo_trains_on_one_mesh_and_goes_on_as_a_pipeline() -> None:
    printed = invoke("demo", "--steps", "16", "--microbatches", "2", "--schedule", "1f1b")
    first, second = printed.split("now as a pipeline of 2 stages")
    assert "predicted: 2 submeshes" in second and "executed: 2 submeshes" in second
    assert second.count("submesh 1") == 2 and "1▓" in second
    losses = [losses_in(part) for part in (first, second)]
    assert (len(losses[0]), len(losses[1])) == (16, 8)
    assert losses[0][-1] < losses[0][0] - 1
    assert losses[1][0] < losses[0][0] - 1


def test_plan_for_a_cluster_that_is_not_here(tmp_path: Path) -> None:
    file, stages = tmp_path / "plan.json", tmp_path / "stages"
    args = ["plan", "mlp", "--size", "tiny", "--cluster", "v5p", "--topology", "2x2x1", "--batch", "64"]
    options = ("--option", "verify=off", "-O", "overlap=true")
    printed = invoke(*args, "--method", "sharded:2x2", "-o", file, "--dump", stages, *options)
    assert "2x2" in printed
    assert Plan.load(file).cluster.overlap and not Plan.load(file).verification
    assert Plan.load(file).num_devices == 4
    assert next(f.name for f in sorted(stages.iterdir())) == "01_tracing.txt"


def test_a_model_without_text_trains_on_one_batch() -> None:
    printed = invoke("train", "mlp", "--size", "tiny", "--batch", "16", "--steps", "3", "--method", "off")
    assert "one random batch of 16" in printed


def invoke(*args: str | Path) -> str:
    result = runner.invoke(app, [str(arg) for arg in args])
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.parametrize("command", ["demo", "train", "plan", "show", "explain", "diff", "clusters", "calibrate"])
def test_every_command_has_a_help_text(command: str) -> None:
    assert "Usage" in invoke(command, "--help")


def test_the_help_of_verify_names_the_extras_to_install() -> None:
    text = " ".join(invoke("verify", "--help").split())
    assert "tpu-verify" in text and "cuda-verify" in text


FOR_A100 = ["--cluster", "a100", "--batch", "8"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["show", "nowhere.json"], "nowhere.json"),
        (["diff", "nowhere.json", "nowhere.json"], "nowhere.json"),
        (["explain", "{file}", "h_3/mlp/upp/kernel"], "Did you mean"),
        (["plan", "gpt", "--cluster", "v99", "--batch", "8"], "v99"),
        (["plan", "gpt", "--cluster", "v5p", "--topology", "4by4", "--batch", "8"], "4by4"),
        (["plan", "gpt", *FOR_A100, "--method", "magic"], "magic"),
        (["plan", "gpt", *FOR_A100, "--size", "huge"], "huge"),
        (["plan", "gpt", *FOR_A100, "--set", "seq"], "NAME=VALUE"),
        (["plan", "gpt", *FOR_A100, "--option", "efort=quick"], "did you mean effort?"),
        (["plan", "gpt", *FOR_A100, "-O", "effort=much"], "effort='much': use \"quick\""),
        (["plan", "nothing", *FOR_A100], "nothing"),
        (["train", "gpt", "stray"], "stray"),
        (["train", "gpt", "--text", "nowhere.txt", "--steps", "1"], "nowhere.txt"),
        (["train", "gpt", "--devices", "999"], "999"),
        (["plan", "gpt", *FOR_A100, "--method", "data", "--stages", "2"], "--method pipeline"),
        (["plan", "gpt", *FOR_A100, "--schedule", "magic"], "magic"),
        (["train", "mlp", "--batch", "8", "--method", "data", "--trace", "t.json"], "--trace"),
    ],
)
def test_mistakes_are_one_message_without_a_traceback(args: list[str], message: str, file: str) -> None:
    result = runner.invoke(app, [arg.format(file=file) for arg in args])
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stderr.startswith("error: ")
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


def test_show_writes_one_page_for_a_browser(file: str, tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    assert str(page) in invoke("show", file, "--html", page).replace("\n", "")
    assert page.read_text(encoding="utf-8").lower().startswith("<!doctype html")
    result = runner.invoke(app, ["show", file, "--html", str(tmp_path / "no" / "plan.html")])
    assert result.exit_code == 2 and "--html" in result.stderr


def test_version() -> None:
    assert re.match(r"alpa-lite \d+\.\d+\.\d+ \(JAX \d+\.\d+", invoke("--version"))


OWN = """
import jax, jax.numpy as jnp, alpa_lite

def abstract_args():
    return jax.ShapeDtypeStruct((16, 8), jnp.float32), jax.ShapeDtypeStruct((32, 16), jnp.float32)

@alpa_lite.parallelize(method=alpa_lite.DataParallel(), static_argnames="scale")
def train(w, x, *, scale=1.0):
    loss, grad = jax.value_and_grad(lambda w: ((x @ w) ** 2).mean())(w)
    return w - scale * grad, loss

kwargs = {"scale": 0.5}
"""


def test_plan_takes_a_step_of_the_users_own_as_it_was_decorated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", list(sys.path))
    (tmp_path / "own_training.py").write_text(OWN)
    named = ["own_training:train", "--args", "own_training:abstract_args", "--kwargs", "own_training:kwargs"]
    invoke("plan", *named, "--cluster", "H100", "-o", "plan.json")
    plan = Plan.load("plan.json")
    assert plan.method == "DataParallel" or "data" in plan.method.lower()
    assert plan.cluster == Cluster.preset("h100")
    assert json.loads(Path("plan.json").read_text())["step"]["args"] == "own_training:abstract_args"
    invoke("plan", *named, "--cluster", "h100", "--method", "zero3", "-o", "plan.json")
    assert Plan.load("plan.json").method != plan.method
    for wrong, words in (
        (["own_training:train", "--cluster", "h100"], "--args"),
        ([*named, "--cluster", "h100", "--batch", "8"], "--batch is for models"),
        (["gpt", "--cluster", "h100"], "--batch is missing"),
        (["gpt", "--cluster", "h100", "--batch", "8", "--args", "a:b"], "--args is for steps of your own"),
    ):
        result = runner.invoke(app, ["plan", *wrong])
        assert result.exit_code == 2 and words in " ".join(result.stderr.split())
