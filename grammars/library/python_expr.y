// A Python expression on one line, as eval() of Python 3.11 accepts it.
//
// The binary operators are one list, and so are the comparisons, and "and" and "or", because their
// precedences do not change which texts are valid. A comparison cannot follow "*" and "**".

%start expressions
%reserved "as" "assert" "break" "class" "continue" "def" "del" "elif" "except" "finally" "from"
%reserved "global" "import" "nonlocal" "pass" "raise" "return" "try" "while" "with" "yield"
// A word right after a number, as in `1if`: first for decimal numbers, then for j and other bases.
%reserved "/([0-9](_?[0-9])*(\.([0-9](_?[0-9])*)?)?|\.[0-9](_?[0-9])*)([eE][+-]?[0-9](_?[0-9])*)?([A-IK-Za-ik-z_]|[jJ][A-Za-z_])/"
%reserved "/0([xX](_?[0-9a-fA-F])+[G-Zg-z_]|[oO](_?[0-7])+[A-Za-z_]|[bB](_?[01])+[A-Za-z_])/"
%%

SKIP: "/[ \t\f]+/" ;

NAME: "/[A-Za-z_][A-Za-z_0-9]*/" ;

NUMBER
    : "/(0(_?0)*|[1-9](_?[0-9])*|0[xX](_?[0-9a-fA-F])+|0[oO](_?[0-7])+|0[bB](_?[01])+)/"
    | "/([0-9](_?[0-9])*\.([0-9](_?[0-9])*)?|\.[0-9](_?[0-9])*)([eE][+-]?[0-9](_?[0-9])*)?[jJ]?/"
    | "/[0-9](_?[0-9])*([eE][+-]?[0-9](_?[0-9])*[jJ]?|[jJ])/"
    ;

// The escapes \x, \u and \U need their digits; \N{NAME} and f-strings are not accepted.
STRING
    : "/[uU]?'([^'\\\n\r\x00]|\\([^xuUN\r\x00]|\r\n|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U00(0[0-9a-fA-F]|10)[0-9a-fA-F]{4}))*'/"
    | '/[uU]?"([^"\\\n\r\x00]|\\([^xuUN\r\x00]|\r\n|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U00(0[0-9a-fA-F]|10)[0-9a-fA-F]{4}))*"/'
    | '/[uU]?"""("{0,2}([^"\\\x00]|\\([^xuUN\x00]|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U00(0[0-9a-fA-F]|10)[0-9a-fA-F]{4})))*"""/'
    | "/[uU]?'''('{0,2}([^'\\\x00]|\\([^xuUN\x00]|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U00(0[0-9a-fA-F]|10)[0-9a-fA-F]{4})))*'''/"
    | "/[rR]'([^'\\\n\r\x00]|\\([^\r\x00]|\r\n))*'/"
    | '/[rR]"([^"\\\n\r\x00]|\\([^\r\x00]|\r\n))*"/'
    | '/[rR]"""("{0,2}([^"\\\x00]|\\[^\x00]))*"""/'
    | "/[rR]'''('{0,2}([^'\\\x00]|\\[^\x00]))*'''/"
    ;

BYTES
    : "/[bB]'([\x01-\x09\x0b\x0c\x0e-&\x28-\x5b\x5d-\x7f]|\\([\x01-\x0c\x0e-wy-\x7f]|x[0-9a-fA-F]{2}))*'/"
    | '/[bB]"([\x01-\x09\x0b\x0c\x0e-!#-\x5b\x5d-\x7f]|\\([\x01-\x0c\x0e-wy-\x7f]|x[0-9a-fA-F]{2}))*"/'
    | "/([bB][rR]|[rR][bB])'([\x01-\x09\x0b\x0c\x0e-&\x28-\x5b\x5d-\x7f]|\\[\x01-\x0c\x0e-\x7f])*'/"
    | '/([bB][rR]|[rR][bB])"([\x01-\x09\x0b\x0c\x0e-!#-\x5b\x5d-\x7f]|\\[\x01-\x0c\x0e-\x7f])*"/'
    | '/[bB]"""("{0,2}([\x01-!#-\x5b\x5d-\x7f]|\\([\x01-wy-\x7f]|x[0-9a-fA-F]{2})))*"""/'
    | "/[bB]'''('{0,2}([\x01-&\x28-\x5b\x5d-\x7f]|\\([\x01-wy-\x7f]|x[0-9a-fA-F]{2})))*'''/"
    | '/([bB][rR]|[rR][bB])"""("{0,2}([\x01-!#-\x5b\x5d-\x7f]|\\[\x01-\x7f]))*"""/'
    | "/([bB][rR]|[rR][bB])'''('{0,2}([\x01-&\x28-\x5b\x5d-\x7f]|\\[\x01-\x7f]))*'''/"
    ;

expressions
    : expression
    | expression ","
    | expression_list
    | expression_list ","
    ;

expression_list
    : expression "," expression
    | expression_list "," expression
    ;

expression
    : boolean
    | boolean "if" boolean "else" expression
    | "lambda" ":" expression
    | "lambda" parameters ":" expression
    ;

named_expression
    : expression
    | NAME ":=" expression
    ;

boolean
    : inversion
    | boolean "and" inversion
    | boolean "or" inversion
    ;

inversion
    : comparison
    | "not" inversion
    ;

comparison
    : operation
    | comparison COMPARE operation
    | comparison "in" operation
    | comparison "not" "in" operation
    | comparison "is" operation
    | comparison "is" "not" operation
    ;

COMPARE: "==" | "!=" | "<" | "<=" | ">" | ">=" ;

operation
    : factor
    | operation BINARY factor
    | operation "+" factor
    | operation "-" factor
    | operation "*" factor
    | operation "/" factor
    ;

BINARY: "|" | "^" | "&" | "<<" | ">>" | "//" | "%" | "@" ;

factor
    : power
    | "+" factor
    | "-" factor
    | "~" factor
    ;

power
    : awaited
    | awaited "**" factor
    ;

awaited
    : primary
    | "await" primary
    ;

primary
    : atom
    | primary "." NAME
    | primary "(" ")"
    | primary "(" arguments ")"
    | primary "(" named_expression comprehension ")"
    | primary "[" subscripts "]"
    | primary "[" subscripts "," "]"
    ;

atom
    : NAME
    | CONSTANT
    | NUMBER
    | strings
    | byte_strings
    | "(" ")"
    | "(" named_expression ")"
    | "(" named_expression comprehension ")"
    | "(" element "," ")"
    | "(" element_list ")"
    | "(" element_list "," ")"
    | "[" "]"
    | "[" named_expression comprehension "]"
    | "[" elements "]"
    | "[" elements "," "]"
    | "{" "}"
    | "{" elements "}"
    | "{" elements "," "}"
    | "{" named_expression comprehension "}"
    | "{" pairs "}"
    | "{" pairs "," "}"
    | "{" expression ":" expression comprehension "}"
    ;

CONSTANT: "True" | "False" | "None" | "..." ;

strings
    : STRING
    | strings STRING
    ;

byte_strings
    : BYTES
    | byte_strings BYTES
    ;

element
    : named_expression
    | "*" operation
    ;

element_list
    : element "," element
    | element_list "," element
    ;

elements
    : element
    | elements "," element
    ;

pairs
    : pair
    | pairs "," pair
    ;

pair
    : expression ":" expression
    | "**" operation
    ;

comprehension
    : clause
    | comprehension clause
    ;

clause
    : for_clause
    | clause "if" boolean
    ;

for_clause
    : "for" targets "in" boolean
    | "async" "for" targets "in" boolean
    ;

targets
    : target
    | target ","
    | target_list
    | target_list ","
    ;

target_list
    : target "," target
    | target_list "," target
    ;

target
    : simple_target
    | "*" simple_target
    ;

simple_target
    : NAME
    | "(" ")"
    | "(" simple_target ")"
    | "(" target "," ")"
    | "(" target_list ")"
    | "(" target_list "," ")"
    | "[" "]"
    | "[" target "]"
    | "[" target "," "]"
    | "[" target_list "]"
    | "[" target_list "," "]"
    ;

// Arguments without a name come first, then `NAME=` and "*", and after the first "**" only `NAME=` and
// "**". A list and its comma form a rule, so that one lexeme ahead shows if the comma is the last.
arguments
    : positional
    | positional_comma
    | positional_comma keywords
    | keywords
    ;

positional
    : positional_argument
    | positional_comma positional_argument
    ;

positional_comma: positional "," ;

positional_argument
    : named_expression
    | "*" expression
    ;

keywords
    : keyword_arguments
    | keyword_comma
    | keyword_comma mappings
    | mappings
    ;

keyword_arguments
    : NAME "=" expression
    | keyword_comma NAME "=" expression
    | keyword_comma "*" expression
    ;

keyword_comma: keyword_arguments "," ;

mappings
    : mapping_arguments
    | mapping_comma
    ;

mapping_arguments
    : "**" expression
    | mapping_comma "**" expression
    | mapping_comma NAME "=" expression
    ;

mapping_comma: mapping_arguments "," ;

subscripts
    : subscript
    | subscripts "," subscript
    ;

subscript
    : named_expression
    | "*" operation
    | bound ":" bound
    | bound ":" bound ":" bound
    ;

bound
    : %empty
    | expression
    ;

parameters
    : front
    | front_comma
    | front_comma back
    | back
    ;

front
    : plain
    | plain_slash
    | defaults
    | defaults_slash
    ;

front_comma
    : plain_comma
    | plain_slash_comma
    | defaults_comma
    | defaults_slash_comma
    ;

plain
    : NAME
    | plain_comma NAME
    ;

plain_comma: plain "," ;

plain_slash
    : plain_comma "/"
    | plain_slash_comma NAME
    ;

plain_slash_comma: plain_slash "," ;

defaults
    : NAME "=" expression
    | plain_comma NAME "=" expression
    | defaults_comma NAME "=" expression
    ;

defaults_comma: defaults "," ;

defaults_slash
    : defaults_comma "/"
    | plain_slash_comma NAME "=" expression
    | defaults_slash_comma NAME "=" expression
    ;

defaults_slash_comma: defaults_slash "," ;

back
    : starred
    | starred ","
    | starred "," "**" NAME
    | starred "," "**" NAME ","
    | "**" NAME
    | "**" NAME ","
    ;

starred
    : "*" NAME
    | "*" "," keyword_only
    | starred "," keyword_only
    ;

keyword_only
    : NAME
    | NAME "=" expression
    ;
