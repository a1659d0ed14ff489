// Example requests. Their prompts suit the embedded model, which was trained on Python code.

export const EXAMPLES = [
  { name: "Only the model", kind: "", prompt: "def add(a, b):" },
  {
    name: "A date",
    kind: "regex",
    prompt: "# Released on ",
    argument: "(?a)20\\d\\d-(0[1-9]|1[0-2])-(0[1-9]|[12]\\d|3[01])",
  },
  {
    name: "A JSON record",
    kind: "json_schema",
    prompt: "config = ",
    argument: `{
  "type": "object",
  "properties": {
    "name": {"type": "string", "maxLength": 16},
    "port": {"type": "integer", "maximum": 65535},
    "mode": {"enum": ["debug", "release"]}
  },
  "required": ["name", "port", "mode"],
  "additionalProperties": false
}`,
  },
  {
    name: "Arithmetic",
    kind: "yacc",
    prompt: "def area(width, height):\n    return ",
    argument: `%start line
%%

NAME: "/width|height/" ;
NUMBER: "/[2-9]/" ;

line
    : terms "\\n"
    ;

terms
    : sum " + " product
    | sum " - " product
    ;

sum
    : product
    | terms
    ;

product
    : NAME
    | NAME " * " NAME
    | NAME " / " NUMBER
    | NAME " * (" terms ")"
    ;
`,
  },
  {
    name: "One of three",
    kind: "choice",
    prompt: "# Is this function pure? ",
    argument: "yes\nno\nit depends",
  },
  {
    name: "Fields of a record, by a script in Python",
    kind: "python",
    prompt: "user = ",
    argument: `async def main(ctx):
    await ctx.fixed('{"name": "')
    name = await ctx.gen(regex="[a-z]{3,8}")
    await ctx.fixed('", "id": ')
    number = await ctx.gen(regex="[1-9][0-9]{0,3}")
    await ctx.fixed("}")
    ctx.log(name, int(number))
`,
  },
  {
    name: "The shorter of two, by a script in JavaScript",
    kind: "javascript",
    prompt: "def ",
    argument: `async function main(ctx) {
  const start = ctx.label();
  const i = await ctx.fork(2);
  const name = await ctx.gen({ regex: "[a-z_]{2,16}", maxTokens: 8 });
  ctx.vars.set("name" + i, name);
  if (i > 0) return;
  const other = await ctx.waitVar("name1");
  const shorter = other.length < name.length ? other : name;
  await ctx.fixed(shorter + "():", { following: start });
  ctx.log("chosen", shorter);
}
`,
  },
  {
    name: "The longest of four, by forks",
    kind: "controller",
    module: "best_of",
    prompt: 'class Stack:\n    def pop(self):\n        """',
    argument: "4 20 longest",
  },
  {
    name: "A word replaced, by backtracking",
    kind: "controller",
    module: "backtrack",
    prompt: "class Stack:\n    def __init__(",
    argument: "self=this",
  },
];
