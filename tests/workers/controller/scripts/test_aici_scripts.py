"""AICI's interface for scripts in JavaScript, as the notes on it list its names."""

from __future__ import annotations

import pytest

from .script_runs import play, says

pytestmark = pytest.mark.process


def test_the_names_of_aici_have_their_meaning() -> None:
    script = r"""
import * as aici from "aici";
async function main() {
  const prompt = await getPrompt();
  assert(prompt.length === getPromptLen());
  await $`Ultimate answer is to the ${"life"} `;
  const number = await gen({ regex: /[0-9]{2}/, storeVar: "n" });
  checkVars({ n: number });
  const label = new Label();
  await $` and more`;
  print(label.textSince(), label.tokensSince().length, getTokens().length > prompt.length);
  await label.fixedAfter(" or ");
  const tokens = await genTokens({ options: ["red", "blue"] });
  print(aici.detokenize(tokens).decode(), tokensRepr(tokens).length > 0);
  assert(forkSupported() && eosToken() === 0 && selfSeqId() === 0);
  const id = await fork(3);
  setLogLevel(0);
  if (id) {
    setVar("of" + id, "value " + id);
    return;
  }
  appendVar("own", "a");
  appendVar("own", "b");
  const [one, two] = await waitVars("of1", "of2");
  console.log(one.decode(), two.decode(), getVar("own").decode(), getVar("none"), inspect([1]));
}
test(main);
"""
    run = play(script, prompt="Q", choose=says("42blue"))
    assert not run.errors
    assert run.text().startswith("Ultimate answer is to the life 42 or ")
    lines = run.logs[0].splitlines()
    assert lines[0].startswith(" and more ")
    assert lines[1].split()[0] in ("red", "blue")
    assert lines[-2:] == ["value 1 value 2 ab null [1]", "TEST OK"]


def test_a_text_has_at_most_20_tokens_unless_max_tokens_is_given() -> None:
    run = play("start(async () => { await gen(); await gen({ maxTokens: 7 }); });")
    assert run.sampled == 27


def test_next_token_steps_through_single_tokens() -> None:
    script = """
class Forced extends NextToken {
  midProcess() { return MidProcessResult.bias(new TokenSet().add(tokenize("q")[0])); }
}
class Spliced extends NextToken {
  midProcess() { return MidProcessResult.splice(0, tokenize("spliced")); }
}
async function main() {
  await $`a`;
  await new Forced().run();
  print(detokenize(await new Spliced().run()).decode());
}
start(main);
"""
    run = play(script)
    assert (run.text(), run.logs[0]) == ("aqspliced", "spliced\n")


def test_an_assertion_that_fails_ends_the_sequence_with_its_line() -> None:
    run = play("async function main() {\n  checkVar('n', 'x');\n}\nstart(main);")
    assert "line 2: Error: variable n: null != x" in run.errors[0]
