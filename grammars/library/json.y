// JSON as RFC 8259 has it. Any value may be the whole text.

%start value
%%

SKIP: "/[ \t\n\r]+/" ;

STRING: '/"([^"\\\x00-\x1f]|\\(["\\/bfnrt]|u[0-9a-fA-F]{4}))*"/' ;

SCALAR
    : "true"
    | "false"
    | "null"
    | "/-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?/"
    ;

value
    : STRING
    | SCALAR
    | "{" "}"
    | "{" members "}"
    | "[" "]"
    | "[" elements "]"
    ;

members
    : STRING ":" value
    | members "," STRING ":" value
    ;

elements
    : value
    | elements "," value
    ;
