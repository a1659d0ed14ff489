"""Scripts in JavaScript can use the names of AICI's interface."""

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


def test_the_constraints_of_aici_answer_about_single_tokens() -> None:
    script = r"""
function told(name, constraint, ...texts) {
  const found = [];
  for (const text of ["", ...texts]) {
    for (const token of text ? tokenize(text) : []) {
      assert(constraint.tokenAllowed(token), name);
      constraint.appendToken(token);
    }
    const set = new TokenSet();
    constraint.allowTokens(set);
    assert(set.has(eosToken()) === constraint.eosAllowed());
    found.push([constraint.eosAllowed(), constraint.eosForced(), set.has(tokenize("b")[0])]);
  }
  print(name, found);
}
async function main() {
  told("free", new Constraint(), "a");
  told("regex", new RegexConstraint("a(bc)?"), "a", "b");
  told("pattern", new RegexConstraint(/ab?/), "a", "b");
  told("cfg", new CfgConstraint('%start s\n%%\ns : "a" "b" ;\n'), "a", "b");
  told("substr", new SubStrConstraint("abc", "."), "a", "b", ".");
  told("choose", new ChooseConstraint(["a", "ab"]), "a", "b");
  const next = new ConstrainedToken(() => new RegexConstraint("q{2}"));
  let tokens = [];
  while (!next.finished) tokens = tokens.concat(await next.run());
  print(detokenize(tokens).decode());
  new RegexConstraint("(").eosAllowed();
}
start(main);
"""
    run = play(script)
    lines = run.logs[0].splitlines()
    assert lines[:6] == [
        "free [[true,false,true],[true,false,true]]",
        "regex [[false,false,false],[true,false,true],[false,false,false]]",
        "pattern [[false,false,false],[true,false,true],[true,true,false]]",
        "cfg [[false,false,false],[false,false,true],[true,true,false]]",
        "substr [[false,false,true],[false,false,true],[false,false,false],[true,true,false]]",
        "choose [[false,false,false],[true,false,true],[true,true,false]]",
    ]
    assert (lines[6], run.text()) == ("qq", "qq")
    assert "line 27: TypeError: regex: missing )" in run.errors[0]


def test_a_script_may_not_ask_a_constraint_without_end() -> None:
    script = """start(async () => {
  for (;;) {
    const constraint = new RegexConstraint("a+");
    constraint.eosAllowed();
  }
});"""
    assert "more than 256 times in one call" in play(script).errors[0]


def test_a_step_without_a_token_is_skipped() -> None:
    script = """
class Skipped extends NextToken {
  midProcess() { return MidProcessResult.noop(); }
}
class Stops extends NextToken {
  midProcess() { return MidProcessResult.stop(); }
}
start(async () => {
  print((await new Skipped().run()).length, new Skipped().isFixed());
  await $`a`;
  await new Stops();
});
"""
    run = play(script)
    assert (run.text(), run.logs[0], run.sampled, run.ended[0]) == ("a", "0 false\n", 0, "stop")


NAMES = """start test $ fixed gen genTokens fork forkSupported waitVars getVar setVar appendVar
checkVar checkVars Label getPrompt getPromptLen getTokens tokenize detokenize tokensRepr eosToken
selfSeqId setLogLevel inspect assert print log NextToken MidProcessResult ConstrainedToken
Constraint RegexConstraint CfgConstraint SubStrConstraint ChooseConstraint TokenSet"""


def test_each_name_is_a_global_and_can_be_imported() -> None:
    names = NAMES.split()
    imports = f"import {{ {', '.join(f'{name} as own_{name}' for name in names)} }} from 'aici';\n"
    same = " && ".join(f"typeof {name} === 'function' && {name} === own_{name}" for name in names)
    run = play(f"{imports}start(async () => {{ print({same}, typeof console.log); }});")
    assert run.logs[0] == "true function\n"
