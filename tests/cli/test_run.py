"""`headrace run`, one answer: which word is what, what comes from pipes, what goes where."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from cli_fakes import FakeService, FakeWorld, fixed

from headrace.cli.app import run_app
from headrace.cli.run import split_words
from headrace.errors import InvalidRequest
from headrace.formats.catalogue import DEFAULT_MODEL
from headrace.types import Message

Pipe = Callable[[bytes], None]
Captured = pytest.CaptureFixture[str]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], (DEFAULT_MODEL, None)),
        (["Why is the sky blue?"], (DEFAULT_MODEL, "Why is the sky blue?")),
        (["Hello"], (DEFAULT_MODEL, "Hello")),
        (["smollm2:135m"], ("smollm2:135m", None)),
        (["gemma3"], ("gemma3", None)),
        (["smollm3"], ("smollm3", None)),
        (["hf:a/b"], ("hf:a/b", None)),
        (["./x.gguf"], ("./x.gguf", None)),
        (["gemma3", "Hello"], ("gemma3", "Hello")),
        (["pulled", "smollm2"], ("pulled", "smollm2")),
        (["hf:owner/pulled"], ("hf:owner/pulled", None)),
    ],
)
def test_one_word_is_a_model_or_a_prompt(words: list[str], expected: tuple[str, str]) -> None:
    assert split_words(words, ["hf:owner/pulled"]) == expected


def test_an_empty_word_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="empty"):
        split_words([" "], [])


def test_the_answer_alone_is_on_stdout(
    world: FakeWorld, model: str, pipe: Pipe, capsys: Captured
) -> None:
    pipe(b"")
    assert run_app(["run", model, "Why?", "--verbose"], world.tools()) == 0
    out, err = capsys.readouterr()
    assert out == "It is Rayleigh.\n"
    assert "tokens/s" in err
    assert "12 MiB in all" in err
    assert "temperature 0.7" in err
    assert world.service.asked == [(Message("user", "Why?"),)]
    assert world.service.is_closed


@pytest.mark.parametrize(
    ("words", "piped", "prompt"),
    [
        ([], b"from a pipe\n", "from a pipe\n"),
        (["Sum up:"], b"long text", "Sum up:\n\nlong text"),
        (["Sum up:"], b" \n", "Sum up:"),
        (["Sum up:"], "\u00e9\U0001f600".encode(), "Sum up:\n\n\u00e9\U0001f600"),
    ],
)
def test_piped_text_is_the_prompt_or_follows_it(
    world: FakeWorld,
    model: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    piped: bytes,
    prompt: str,
) -> None:
    source = tmp_path / "piped"
    source.write_bytes(piped)
    with open(source, encoding="utf-8") as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        assert run_app(["run", model, *words], world.tools()) == 0
    assert world.service.asked[0][0].content == prompt


@pytest.mark.parametrize(
    ("piped", "said"), [(b"\xff\xfe", "not UTF-8"), (b"", "empty"), (b" \n", "empty")]
)
def test_a_pipe_without_text_is_an_error(
    world: FakeWorld, model: str, pipe: Pipe, capsys: Captured, piped: bytes, said: str
) -> None:
    pipe(piped)
    assert run_app(["run", model], world.tools()) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert said in err
    assert world.opened == []


def test_options_reach_the_sampler_and_the_engine(world: FakeWorld, model: str, pipe: Pipe) -> None:
    pipe(b"")
    line = """--temperature 0 --max-tokens 5 --seed 7 --top-k 3 --top-p 0.5 --min-p 0.1
        --typical-p 0.9 --top-n-sigma 2 --repetition-penalty 1.1 --presence-penalty 0.2
        --frequency-penalty 0.3 --logit-bias 5:-100 --logit-bias 6:1.5 --stop A --stop B
        --stop-token-id 9 --min-tokens 2 --ignore-eos --threads 1 --context 64
        --backend reference --system Be-brief"""
    assert run_app(["run", model, "Why?", *line.split()], world.tools()) == 0
    params = world.service.requests[0].params
    assert (params.temperature, params.max_tokens, params.seed) == (0.0, 5, 7)
    assert (params.top_k, params.top_p, params.min_p) == (3, 0.5, 0.1)
    assert (params.typical_p, params.top_n_sigma, params.min_tokens) == (0.9, 2.0, 2)
    assert params.repetition_penalty == 1.1
    assert (params.presence_penalty, params.frequency_penalty) == (0.2, 0.3)
    assert params.logit_bias == ((5, -100.0), (6, 1.5))
    assert (params.stop, params.stop_token_ids) == (("A", "B"), (9,))
    assert params.ignore_eos
    config = world.opened[0][1]
    assert (config.backend, config.num_threads, config.max_context) == ("reference", 1, 64)
    assert world.service.asked[0][0] == Message("system", "Be-brief")


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--temperature", "-1"], "temperature is -1.0; it must be between 0.0 and 100.0"),
        (["--max-tokens", "0"], "max_tokens is 0"),
        (["--logit-bias", "x"], "TOKEN:BIAS"),
        (["--backend", "magic"], "use cpu or reference"),
    ],
)
def test_a_bad_value_is_refused_before_anything_is_loaded(
    world: FakeWorld, model: str, capsys: Captured, args: list[str], said: str
) -> None:
    assert run_app(["run", model, "Why?", *args], world.tools()) == 1
    assert said in capsys.readouterr().err.replace("\n", " ")
    assert world.opened == []


@pytest.mark.parametrize("args", [["a", "b", "c"], ["--frobnicate"], ["--top-k", "many"]])
def test_wrong_usage_is_exit_code_2(world: FakeWorld, capsys: Captured, args: list[str]) -> None:
    assert run_app(["run", *args], world.tools()) == 2
    assert "Usage: headrace run" in capsys.readouterr().err


def test_a_misspelt_model_is_an_error_not_a_prompt(world: FakeWorld, capsys: Captured) -> None:
    assert run_app(["run", "smollm3"], world.tools()) == 1
    assert "did you mean smollm2:135m?" in capsys.readouterr().err
    assert world.opened == []


def test_a_model_that_is_not_here_is_an_error_when_offline(
    world: FakeWorld, pipe: Pipe, capsys: Captured
) -> None:
    pipe(b"")
    assert run_app(["run", "Why is the sky blue?"], world.tools()) == 1
    assert "smollm2:135m is not in the store" in capsys.readouterr().err


# ---- the answer's end and form


def test_an_answer_cut_by_its_limit_says_so(
    world: FakeWorld, model: str, pipe: Pipe, capsys: Captured
) -> None:
    pipe(b"")
    assert run_app(["run", model, "Why?", "--max-tokens", "1"], world.tools()) == 0
    out, err = capsys.readouterr()
    assert out == "It is \n"
    assert "stopped after 1 tokens" in err


def test_an_answer_that_fills_the_context_warns(
    tmp_path: Path, model: str, pipe: Pipe, capsys: Captured
) -> None:
    world = FakeWorld(tmp_path / "store", FakeService(fixed(*["x"] * 200)))
    pipe(b"")
    assert run_app(["run", model, "Why?", "--quiet"], world.tools()) == 0
    assert "warning: the answer was cut after 97 tokens" in capsys.readouterr().err


@pytest.mark.parametrize("args", [[], ["--raw"]])
def test_a_base_model_completes_the_prompt(
    world: FakeWorld, model: str, pipe: Pipe, capsys: Captured, args: list[str]
) -> None:
    world.service.has_template = False
    pipe(b"")
    assert run_app(["run", model, "Once upon", *args], world.tools()) == 0
    assert world.service.asked == [(Message("raw", "Once upon"),)]
    assert ("no chat template" in capsys.readouterr().err) == (not args)


def test_raw_and_system_do_not_go_together(
    world: FakeWorld, model: str, pipe: Pipe, capsys: Captured
) -> None:
    pipe(b"")
    assert run_app(["run", model, "Why?", "--raw", "--system", "x"], world.tools()) == 1
    assert "system text needs a chat template" in capsys.readouterr().err
    assert world.service.is_closed


def test_quiet_is_only_the_answer(
    world: FakeWorld, model: str, pipe: Pipe, capsys: Captured
) -> None:
    pipe(b"")
    world.service.has_template = False
    assert run_app(["run", model, "Why?", "-q", "--max-tokens", "1"], world.tools()) == 0
    assert capsys.readouterr() == ("It is \n", "")


# ---- where the temperature comes from


def test_defaults_come_from_the_file(world: FakeWorld, model: str, pipe: Pipe) -> None:
    pipe(b"")
    world.metadata = {"general.sampling.temp": 0.3, "general.sampling.top_k": 20}
    run_app(["run", model, "Why?", "--top-k", "5"], world.tools())
    params = world.service.requests[0].params
    assert (params.temperature, params.top_k) == (0.3, 5)


@pytest.mark.parametrize(
    ("config", "temperature"),
    [
        ({"do_sample": False, "temperature": 0.9}, 0.0),
        ({"do_sample": True, "temperature": 0.9}, 0.9),
        ({"temperature": 0.9}, 0.9),
        ({"eos_token_id": 2}, 0.7),
        ({"temperature": None}, 0.7),
    ],
)
def test_defaults_come_from_generation_config(
    world: FakeWorld, model: str, pipe: Pipe, config: dict[str, object], temperature: float
) -> None:
    pipe(b"")
    world.metadata = {"generation_config": config}
    run_app(["run", model, "Why?"], world.tools())
    assert world.service.requests[0].params.temperature == temperature


def test_a_template_file_replaces_the_models(world: FakeWorld, model: str, pipe: Pipe) -> None:
    file = Path(world.root.parent / "chat.jinja")
    file.write_text("{{ messages }}")
    world.metadata["tokenizer.chat_template"] = "the file's own"
    pipe(b"")
    assert run_app(["run", model, "Hi", "--chat-template", str(file)], world.tools()) == 0
    assert run_app(["run", model, "Hi"], world.tools()) == 0
    assert world.templates == ["{{ messages }}", "the file's own"]


def test_a_template_file_that_is_not_there_is_named(
    world: FakeWorld, model: str, pipe: Pipe, capsys: Captured
) -> None:
    pipe(b"")
    assert run_app(["run", model, "Hi", "--chat-template", "no.jinja"], world.tools()) == 1
    assert "--chat-template no.jinja cannot be read" in capsys.readouterr().err
