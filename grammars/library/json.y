// JSON as defined by RFC 8259, with bounded white space: before each lexeme and at the end of the text,
// one space, or a line end and an indentation, is allowed. Any value may be the whole text.

%lexer declared
%start text
%%

text
    : value
    | value END
    ;

END: "/ |\r?\n/" ;

STRING: '/( |\r?\n( {0,64}|\t{0,32}))?"([^"\\\x00-\x1f]|\\(["\\/bfnrt]|u[0-9a-fA-F]{4}))*"/' ;

SCALAR: "/( |\r?\n( {0,64}|\t{0,32}))?(true|false|null|-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?)/" ;

OBJECT: "/( |\r?\n( {0,64}|\t{0,32}))?\{/" ;
OBJECT_END: "/( |\r?\n( {0,64}|\t{0,32}))?\}/" ;
LIST: "/( |\r?\n( {0,64}|\t{0,32}))?\[/" ;
LIST_END: "/( |\r?\n( {0,64}|\t{0,32}))?\]/" ;
COMMA: "/( |\r?\n( {0,64}|\t{0,32}))?,/" ;
COLON: "/( |\r?\n( {0,64}|\t{0,32}))?:/" ;

value
    : STRING
    | SCALAR
    | OBJECT OBJECT_END
    | OBJECT members OBJECT_END
    | LIST LIST_END
    | LIST elements LIST_END
    ;

members
    : STRING COLON value
    | members COMMA STRING COLON value
    ;

elements
    : value
    | elements COMMA value
    ;
