// A part of C as grammars for AICI are written: it needs both of AICI's lexer rules. A directive
// begins with the newline before it, also in the first line of a file. TYPE_NAME is written with
// more characters than IDENTIFIER, so that it wins although it comes later.

%start file

%left "||"
%left "&&"
%left "==" "!="
%left "<" ">" "<=" ">="
%left "+" "-"
%left "*" "/" "%"
%nonassoc THEN
%nonassoc "else"
%%

SKIP
    : "//\*([^*]|\*+[^*/])*\*+//"       // block comment
    | "///.*/"                          // line comment
    | "/\n[ \t]*#(.*\\\n)*.*/"          // directive
    | "/\n?[ \t\f]*/"                   // white space
    ;

IDENTIFIER: "/[a-zA-Z_][a-zA-Z_0-9]*/" ;

TYPE_NAME: "/[a-zA-Z_][a-zA-Z_0-9]*_t|FILE/" ;

CONSTANT
    : "/[0-9]+[uUlL]*/"
    | "/0[xX][0-9a-fA-F]+[uUlL]*/"
    | "/'([^'\\\n]|\\.)+'/"
    ;

STRING_LITERAL: '/"([^"\\\n]|\\.)*"/' ;

file
    : item
    | file item
    ;

item
    : declaration
    | specifiers declarator block
    ;

declaration
    : specifiers ";"
    | specifiers declarators ";"
    ;

specifiers
    : specifier
    | specifiers specifier
    ;

specifier
    : "typedef" | "extern" | "static" | "const" | "void" | "char" | "int" | "unsigned" | "double"
    | TYPE_NAME
    | "struct" IDENTIFIER
    | "struct" IDENTIFIER "{" fields "}"
    ;

fields
    : declaration
    | fields declaration
    ;

declarators
    : initialized
    | declarators "," initialized
    ;

initialized
    : declarator
    | declarator "=" initializer
    ;

initializer
    : assignment
    | "{" initializers "}"
    ;

initializers
    : initializer
    | initializers "," initializer
    ;

declarator
    : direct_declarator
    | pointer direct_declarator
    ;

pointer
    : "*"
    | pointer "*"
    | pointer "const"
    ;

direct_declarator
    : IDENTIFIER
    | "(" declarator ")"
    | direct_declarator "[" "]"
    | direct_declarator "[" operation "]"
    | direct_declarator "(" ")"
    | direct_declarator "(" parameters ")"
    ;

parameters
    : parameter
    | parameters "," parameter
    ;

parameter
    : type
    | specifiers declarator
    ;

type
    : specifiers
    | specifiers pointer
    ;

block
    : "{" "}"
    | "{" steps "}"
    ;

steps
    : step
    | steps step
    ;

step
    : declaration
    | statement
    ;

statement
    : block
    | ";"
    | expression ";"
    | "if" "(" expression ")" statement %prec THEN
    | "if" "(" expression ")" statement "else" statement
    | "while" "(" expression ")" statement
    | "for" "(" step optional ";" optional ")" statement
    | "return" optional ";"
    | "break" ";"
    | "continue" ";"
    ;

optional
    : %empty
    | expression
    ;

expression
    : assignment
    | expression "," assignment
    ;

assignment
    : operation
    | operation "?" expression ":" assignment
    | unary "=" assignment
    | unary "+=" assignment
    | unary "-=" assignment
    ;

operation
    : operation "||" operation
    | operation "&&" operation
    | operation "==" operation
    | operation "!=" operation
    | operation "<" operation
    | operation ">" operation
    | operation "<=" operation
    | operation ">=" operation
    | operation "+" operation
    | operation "-" operation
    | operation "*" operation
    | operation "/" operation
    | operation "%" operation
    | cast
    ;

cast
    : unary
    | "(" type ")" cast
    ;

unary
    : postfix
    | "++" unary
    | "--" unary
    | "&" cast
    | "*" cast
    | "-" cast
    | "!" cast
    | "sizeof" unary
    | "sizeof" "(" type ")"
    ;

postfix
    : IDENTIFIER
    | CONSTANT
    | strings
    | "(" expression ")"
    | postfix "[" expression "]"
    | postfix "(" ")"
    | postfix "(" arguments ")"
    | postfix "." IDENTIFIER
    | postfix "->" IDENTIFIER
    | postfix "++"
    | postfix "--"
    ;

strings
    : STRING_LITERAL
    | strings STRING_LITERAL
    ;

arguments
    : assignment
    | arguments "," assignment
    ;
