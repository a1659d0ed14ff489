// Arithmetic: numbers, names, calls, the five operators, signs and parentheses.

%start sum

%left "+" "-"
%left "*" "/"
%right SIGN
%right "^"
%%

SKIP: "/[ \t\n\r]+/" ;

NUMBER: "/([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?/" ;

NAME: "/[A-Za-z_][A-Za-z_0-9]*/" ;

sum
    : sum "+" sum
    | sum "-" sum
    | sum "*" sum
    | sum "/" sum
    | sum "^" sum
    | "+" sum %prec SIGN
    | "-" sum %prec SIGN
    | "(" sum ")"
    | NAME "(" arguments ")"
    | NAME "(" ")"
    | NAME
    | NUMBER
    ;

arguments
    : sum
    | arguments "," sum
    ;
