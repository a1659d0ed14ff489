// C11 before the preprocessor: directives are skipped like comments, macros are names and calls.
//
// The grammar does not have a symbol table: a name is a type if the lexemes around it do not allow
// another reading; c.md lists the texts for which this is not enough. The binary operators are one
// list, because their precedences do not change which texts are valid.

%start file
%lexer declared

%reserved "_Imaginary"
// Lexemes of the preprocessor that are not lexemes of C, such as `0x1e+1` and `1.0.x`, and words after
// `#` that are not the name of a directive.
%reserved "/\.?[0-9]([0-9A-Za-z_.]|[eEpP][+-])*[eEpP][+-]/"
%reserved "/(\.[0-9]|[0-9]+[A-Za-z_.])([0-9A-Za-z_.]|[eEpP][+-])*\./"
%reserved "/(\n[ \t\v\f\r]*)?#[ \t\r]*([^ \t\r\n]|(define|elif|else|endif|error|if|ifdef|ifndef|include|line|pragma|undef)[A-Za-z_0-9\\\x80-\U0010ffff])/"

// A name in parentheses, and a name before "*" where a declaration may stand, are rules of their own,
// so that the parser shifts. After `( name )`, a sign is an operator between two values, and a
// parenthesis begins a cast's operand or a call's arguments.
%nonassoc NAME
%nonassoc ")" "++" "--" "&" "*" "+" "-"
%nonassoc VALUE
%nonassoc "("
%nonassoc THEN
%nonassoc "else"
%%

SKIP
    : "/\/\*([^*]|\*+[^\/*\\])*\*+\//"          // block comment
    | "/\/\/(.*\\\r?\n)*.*/"                    // line comment
    | "/\n?[ \t\v\f\r]*/"                       // white space
    | "/\\\r?\n[ \t\v\f\r\n]/"                  // line joined to the next, not within a lexeme
    // A directive on a line of its own: its name, and any text. A block comment in it ends on this line.
    | "/\n[ \t\v\f\r]*#[ \t\r]*((define|elif|else|endif|error|if|ifdef|ifndef|include|line|pragma|undef)([^A-Za-z_0-9\\\/\n\x80-\U0010ffff]([^\/\n]|\\\r?\n)*)?((\/(\\\r?\n)*)+(\*([^*\n]|\*+[^\/*\n])*\*+\/|[^*\/\n])([^\/\n]|\\\r?\n)*)*(\/(\\\r?\n)*)*)?/"
    ;

IDENTIFIER: "/([A-Za-z_]|\\u[0-9a-fA-F]{4}|\\U[0-9a-fA-F]{8})([A-Za-z_0-9]|\\u[0-9a-fA-F]{4}|\\U[0-9a-fA-F]{8})*/" ;

CONSTANT
    : "/(0[0-7]*|[1-9][0-9]*|0[xX][0-9a-fA-F]+)([uU](l|L|ll|LL)?|(l|L|ll|LL)[uU]?)?/"
    | "/([0-9]+\.[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?[fFlL]?/"
    | "/[0-9]+[eE][+-]?[0-9]+[fFlL]?/"
    | "/0[xX]([0-9a-fA-F]+\.?[0-9a-fA-F]*|\.[0-9a-fA-F]+)[pP][+-]?[0-9]+[fFlL]?/"
    | "/[LuU]?'([^'\\\n\x00]|\\(['\x22?\\abfnrtv]|[0-7]{1,3}|x[0-9a-fA-F]+|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}))+'/"
    ;

STRING: '/(L|u8?|U)?"([^"\\\n\x00]|\\([\x27"?\\abfnrtv\n]|[0-7]{1,3}|x[0-9a-fA-F]+|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}))*"/' ;

// Only the first lexeme of a text is a directive of the grammar, because with "%lexer declared" the
// lexer does not begin as if after a newline; SKIP matches the other directives.
FIRST_DIRECTIVE: "/#[ \t\r]*((define|elif|else|endif|error|if|ifdef|ifndef|include|line|pragma|undef)([^A-Za-z_0-9\\\/\n\x80-\U0010ffff]([^\/\n]|\\\r?\n)*)?((\/(\\\r?\n)*)+(\*([^*\n]|\*+[^\/*\n])*\*+\/|[^*\/\n])([^\/\n]|\\\r?\n)*)*(\/(\\\r?\n)*)*)?/" ;

file
    : translation_unit
    | FIRST_DIRECTIVE
    | FIRST_DIRECTIVE translation_unit
    ;

translation_unit
    : external_declaration
    | translation_unit external_declaration
    ;

external_declaration
    : specifiers declarator compound_statement
    | IDENTIFIER ";"                // a macro
    | tagged_type ";"
    | specifiers init_declarators ";"
    | static_assert
    ;

// Specifiers. At most one typedef name, and only without the keyword of a type. `void`, `_Bool`,
// structs, unions, enums and `_Atomic(...)` stand alone; `char int float double` exclude each other.

specifiers
    : named_specifiers
    | plain_specifiers
    ;

named_specifiers                    // begin with a typedef name
    : IDENTIFIER
    | named_specifiers specifier_word
    ;

plain_specifiers                    // begin with a keyword
    : words IDENTIFIER
    | typed_specifiers
    | plain_specifiers_after_name
    ;

plain_specifiers_after_name
    : words IDENTIFIER specifier_word
    | plain_specifiers_after_name specifier_word
    ;

typed_specifiers
    : single_specifiers
    | size_specifiers
    | number_specifiers
    ;

single_specifiers
    : single_type
    | words single_type
    | single_specifiers specifier_word
    ;

single_type
    : tagged_type
    | "void"
    | "_Bool"
    | "_Atomic" "(" any_type_name ")"
    ;

size_specifiers
    : SIZE
    | words SIZE
    | size_specifiers SIZE
    | size_specifiers specifier_word
    ;

number_specifiers
    : NUMBER
    | words NUMBER
    | size_specifiers NUMBER
    | number_specifiers SIZE
    | number_specifiers specifier_word
    ;

SIZE: "short" | "long" | "signed" | "unsigned" | "_Complex" ;

NUMBER: "char" | "int" | "float" | "double" ;

words
    : specifier_word
    | words specifier_word
    ;

specifier_word
    : STORAGE_WORD
    | QUALIFIER
    | "static"
    | "_Alignas" "(" type_name ")"
    | "_Alignas" "(" conditional ")"
    ;

STORAGE_WORD
    : "typedef" | "extern" | "auto" | "register" | "_Thread_local" | "inline" | "_Noreturn"
    ;

QUALIFIER: "const" | "restrict" | "volatile" ;

tagged_type
    : STRUCT_OR_UNION IDENTIFIER
    | STRUCT_OR_UNION "{" fields "}"
    | STRUCT_OR_UNION IDENTIFIER "{" fields "}"
    | "enum" IDENTIFIER
    | "enum" "{" enumerators "}"
    | "enum" "{" enumerators "," "}"
    | "enum" IDENTIFIER "{" enumerators "}"
    | "enum" IDENTIFIER "{" enumerators "," "}"
    ;

STRUCT_OR_UNION: "struct" | "union" ;

fields
    : field
    | fields field
    ;

field
    : field_specifiers ";"
    | field_specifiers field_declarators ";"
    | static_assert
    ;

field_declarators
    : field_declarator
    | field_declarators "," field_declarator
    ;

field_declarator
    : declarator
    | declarator ":" conditional
    | ":" conditional
    ;

enumerators
    : enumerator
    | enumerators "," enumerator
    ;

enumerator
    : IDENTIFIER
    | IDENTIFIER "=" conditional
    ;

// Types without storage words, for fields, casts and sizeof.

field_specifiers
    : IDENTIFIER
    | IDENTIFIER qualifiers
    | keyword_specifiers
    ;

keyword_specifiers                  // begin with a keyword
    : qualifiers IDENTIFIER
    | qualifiers IDENTIFIER qualifiers
    | typed_field_specifiers
    ;

typed_field_specifiers
    : single_field_specifiers
    | size_field_specifiers
    | number_field_specifiers
    ;

single_field_specifiers
    : single_type
    | qualifiers single_type
    | single_field_specifiers qualifier
    ;

size_field_specifiers
    : SIZE
    | qualifiers SIZE
    | size_field_specifiers SIZE
    | size_field_specifiers qualifier
    ;

number_field_specifiers
    : NUMBER
    | qualifiers NUMBER
    | size_field_specifiers NUMBER
    | number_field_specifiers SIZE
    | number_field_specifiers qualifier
    ;

qualifiers
    : qualifier
    | qualifiers qualifier
    ;

qualifier
    : QUALIFIER
    | "_Alignas" "(" type_name ")"
    | "_Alignas" "(" conditional ")"
    ;

type_name                           // begins with a keyword
    : keyword_specifiers
    | keyword_specifiers abstract_declarator
    | IDENTIFIER qualifiers
    | IDENTIFIER qualifiers abstract_declarator
    ;

any_type_name
    : type_name
    | IDENTIFIER
    | IDENTIFIER abstract_declarator
    ;

// Declarators.

init_declarators
    : init_declarator
    | init_declarators "," init_declarator
    ;

init_declarator
    : declarator
    | declarator "=" initializer
    ;

declarator
    : direct_declarator
    | pointer direct_declarator
    ;

direct_declarator
    : IDENTIFIER
    | "(" declarator ")"
    | direct_declarator array
    | direct_declarator "(" ")"
    | direct_declarator "(" parameters ")"
    ;

pointer
    : "*"
    | "*" pointer_qualifiers
    | "*" pointer
    | "*" pointer_qualifiers pointer
    ;

pointer_qualifiers
    : QUALIFIER
    | pointer_qualifiers QUALIFIER
    ;

array
    : "[" "]"
    | "[" "*" "]"
    | "[" assignment "]"
    | "[" pointer_qualifiers "]"
    | "[" pointer_qualifiers "*" "]"
    | "[" pointer_qualifiers assignment "]"
    | "[" "static" assignment "]"
    | "[" "static" pointer_qualifiers assignment "]"
    | "[" pointer_qualifiers "static" assignment "]"
    ;

parameters
    : parameter_list
    | parameter_list "," "..."
    ;

parameter_list
    : parameter
    | parameter_list "," parameter
    ;

parameter
    : specifiers
    | specifiers declarator
    | specifiers abstract_declarator
    ;

abstract_declarator
    : pointer
    | direct_abstract_declarator
    | pointer direct_abstract_declarator
    ;

direct_abstract_declarator          // not a plain function: its `(T)` would also be a declarator
    : "(" abstract_declarator ")"
    | array
    | direct_abstract_declarator array
    | "(" abstract_declarator ")" "(" ")"
    | "(" abstract_declarator ")" "(" parameters ")"
    ;

initializer
    : assignment
    | braces
    ;

braces
    : "{" initializers "}"
    | "{" initializers "," "}"
    ;

initializers
    : initializer
    | designators "=" initializer
    | initializers "," initializer
    | initializers "," designators "=" initializer
    ;

designators
    : designator
    | designators designator
    ;

designator
    : "[" conditional "]"
    | "." IDENTIFIER
    ;

static_assert: "_Static_assert" "(" conditional "," strings ")" ";" ;

// Statements.

statement
    : compound_statement
    | ";"
    | expression ";"
    | pointer_or_product ";"
    | IDENTIFIER ":" statement
    | "case" conditional ":" statement
    | "default" ":" statement
    | "if" "(" expression ")" statement %prec THEN
    | "if" "(" expression ")" statement "else" statement
    | "switch" "(" expression ")" statement
    | "while" "(" expression ")" statement
    | "do" statement "while" "(" expression ")" ";"
    | "for" "(" first ";" optional ";" optional ")" statement
    | "for" "(" declaration optional ";" optional ")" statement
    | "goto" IDENTIFIER ";"
    | "continue" ";"
    | "break" ";"
    | "return" optional ";"
    ;

first
    : optional
    | pointer_or_product
    ;

optional
    : %empty
    | expression
    ;

compound_statement
    : "{" "}"
    | "{" block_items "}"
    ;

block_items
    : block_item
    | block_items block_item
    ;

block_item
    : declaration
    | statement
    ;

declaration
    : tagged_type ";"
    | plain_specifiers init_declarators ";"
    | IDENTIFIER named_declarators ";"
    | IDENTIFIER words init_declarators ";"
    | IDENTIFIER "*" pointer_qualifiers declarator_rest ";"
    | static_assert
    ;

named_declarators                   // in `T name`: the first declarator begins with its name
    : named_declarator
    | named_declarator "=" initializer
    | named_declarators "," init_declarator
    ;

named_declarator
    : IDENTIFIER
    | named_declarator array
    | named_declarator "(" ")"
    | named_declarator "(" parameters ")"
    ;

declarator_rest                     // in `T *const name`
    : init_declarator
    | declarator_rest "," init_declarator
    ;

// `T * x ...` at the start of a statement is a declaration or a product: the grammar takes both, and
// any text that either allows may follow.
pointer_or_product
    : product_declarator
    | IDENTIFIER "*" operation "?" expression ":" conditional
    | pointer_or_product "," product_next
    ;

product_declarator
    : IDENTIFIER "*" operation
    | IDENTIFIER "*" place "=" initializer
    | IDENTIFIER "*" postfix "[" "]" "=" initializer
    ;

product_next
    : assignment
    | place "=" braces
    ;

// Expressions.

expression
    : assignment
    | expression "," assignment
    ;

assignment
    : conditional
    | place "=" assignment
    | place ASSIGN assignment
    ;

ASSIGN: "*=" | "/=" | "%=" | "+=" | "-=" | "<<=" | ">>=" | "&=" | "^=" | "|=" ;

conditional
    : operation
    | operation "?" expression ":" conditional
    ;

operation
    : cast
    | operation binary cast
    ;

binary: OPERATOR | "*" | "+" | "-" | "&" ;

OPERATOR
    : "/" | "%" | "<<" | ">>" | "<" | ">" | "<=" | ">=" | "==" | "!=" | "^" | "|" | "&&" | "||"
    ;

cast
    : unary
    | type_in_parentheses cast
    | name_in_parentheses cast
    ;

type_in_parentheses                 // cannot be an expression
    : "(" type_name ")"
    | "(" IDENTIFIER "*" pointer_tail ")"
    ;

pointer_tail
    : %empty
    | "*" pointer_tail
    | QUALIFIER pointer_tail
    ;

name_in_parentheses: "(" IDENTIFIER ")" ;

unary
    : place
    | postfix_value
    | "++" unary
    | "--" unary
    | "&" cast
    | "+" cast
    | "-" cast
    | SIGN cast
    | "sizeof" unary
    | "sizeof" type_in_parentheses
    | "_Alignof" "(" any_type_name ")"
    ;

place                               // the left side of an assignment, such as a name; not a constant or a sum
    : postfix_place
    | "*" cast
    ;

SIGN: "~" | "!" ;

postfix
    : postfix_place
    | postfix_value
    ;

postfix_place
    : IDENTIFIER %prec NAME
    | "(" expression ")"
    | product_in_parentheses ")"
    | name_in_parentheses %prec VALUE
    | name_in_parentheses "(" ")"
    | type_in_parentheses braces
    | name_in_parentheses braces
    | postfix "[" expression "]"
    | postfix "(" ")"
    | postfix "(" arguments ")"
    | postfix "." IDENTIFIER
    | postfix "->" IDENTIFIER
    ;

postfix_value
    : CONSTANT
    | strings
    | postfix "++"
    | postfix "--"
    | "_Generic" "(" assignment "," associations ")"
    | "va_arg" "(" assignment "," any_type_name ")"
    | "offsetof" "(" any_type_name "," member ")"
    ;

arguments
    : assignment
    | arguments "," assignment
    ;

// `( name * ...` is a cast to a pointer or a product; this rule is the product.
product_in_parentheses
    : product
    | product "?" expression ":" conditional
    | product_in_parentheses "," assignment
    ;

product
    : "(" IDENTIFIER "*" cast
    | product binary cast
    ;

strings
    : STRING
    | strings STRING
    ;

associations
    : association
    | associations "," association
    ;

association
    : any_type_name ":" assignment
    | "default" ":" assignment
    ;

member
    : IDENTIFIER
    | member "." IDENTIFIER
    | member "[" expression "]"
    ;
