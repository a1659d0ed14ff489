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
    prompt: "result = ",
    argument: `%start sum

%left "+" "-"
%left "*" "/"
%%

NUMBER: "/[0-9]+/" ;
NAME: "/[a-z_]+/" ;

sum
    : sum "+" sum
    | sum "-" sum
    | sum "*" sum
    | sum "/" sum
    | "(" sum ")"
    | NAME
    | NUMBER
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
    name: "The longest of four, by forks",
    kind: "controller",
    module: "best_of",
    prompt: "def ",
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
