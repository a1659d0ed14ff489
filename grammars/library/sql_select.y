// One SELECT statement of SQL: joins, subqueries, WITH, set operations, CASE, CAST, windows.
//
// AND and OR are one list, and so are the operators between values, because their precedences do not
// change which texts are valid. Keywords in any case are regular expressions before NAME, which is
// written with more characters, so the grammar needs "%lexer declared".

%start statement
%lexer declared
%reserved "/(?ai:add|alter|anti|any|array|asof|asymmetric|begin|both|check|collate|column)/"
%reserved "/(?ai:commit|connect_by_root|constraint|create|cube|current|cursor|database)/"
%reserved "/(?ai:declare|default|delete|describe|div|drop|execute|explain|fetch|filter|for)/"
%reserved "/(?ai:foreign|function|glob|grant|if|ignore|ilike|index|insert|interval|into)/"
%reserved "/(?ai:isnull|key|lateral|leading|lock|loop|map|match|merge|natural|notnull|of|only)/"
%reserved "/(?ai:overlaps|partitioned_by|pivot|primary|procedure|qualify|references|regexp)/"
%reserved "/(?ai:replace|return|returning|revoke|rlike|rollback|rollup|row|rows|schema|semi)/"
%reserved "/(?ai:set|show|similar|some|start|straight_join|struct|symmetric|table|tablesample)/"
%reserved "/(?ai:top|trailing|trigger|truncate|uncache|unique|unnest|unpivot|update|use)/"
%reserved "/(?ai:values|view|window|xor)/"
// A word right after a number, as in `1and`.
%reserved "/([0-9]+(\.[0-9]+)?|\.[0-9]+)([eE][+-]?[0-9]+)?[A-Za-z_]/"
%%

// A comment must not contain a comment, which some dialects nest, nor a lone \r, which may end a line.
SKIP: "/(([ \t\n]|\r\n)+|--[^\r\n]*|\/\*(\**[^*\/]|\/+[^*\/])*\*+\/)/" ;

ALL: "/(?ai:all)/" ;
AND: "/(?ai:and)/" ;
AS: "/(?ai:as)/" ;
BETWEEN: "/(?ai:between)/" ;
BY: "/(?ai:by)/" ;
CASE: "/(?ai:case)/" ;
CAST: "/(?ai:cast)/" ;
DIRECTION: "/(?ai:asc|desc)/" ;
DISTINCT: "/(?ai:distinct)/" ;
ELSE: "/(?ai:else)/" ;
END: "/(?ai:end)/" ;
ESCAPE: "/(?ai:escape)/" ;
EXISTS: "/(?ai:exists)/" ;
FROM: "/(?ai:from)/" ;
GROUP: "/(?ai:group)/" ;
HAVING: "/(?ai:having)/" ;
IN: "/(?ai:in)/" ;
IS: "/(?ai:is)/" ;
CROSS: "/(?ai:cross)/" ;
INNER: "/(?ai:inner)/" ;
SIDE: "/(?ai:left|right|full)/" ;
OUTER: "/(?ai:outer)/" ;
JOIN: "/(?ai:join)/" ;
LIKE: "/(?ai:like)/" ;
LIMIT: "/(?ai:limit)/" ;
NOT: "/(?ai:not)/" ;
NULL: "/(?ai:null)/" ;
NULLS: "/(?ai:nulls)/" ;
FIRST_OR_LAST: "/(?ai:first|last)/" ;
OFFSET: "/(?ai:offset)/" ;
ON: "/(?ai:on)/" ;
OR: "/(?ai:or)/" ;
ORDER: "/(?ai:order)/" ;
OVER: "/(?ai:over)/" ;
PARTITION: "/(?ai:partition)/" ;
RECURSIVE: "/(?ai:recursive)/" ;
SELECT: "/(?ai:select)/" ;
SET_OPERATOR: "/(?ai:union|intersect|except)/" ;
THEN: "/(?ai:then)/" ;
TRUTH: "/(?ai:true|false)/" ;
USING: "/(?ai:using)/" ;
WHEN: "/(?ai:when)/" ;
WHERE: "/(?ai:where)/" ;
WITH: "/(?ai:with)/" ;
TYPE
    : "/(?ai:bigint|blob|boolean|char|date|decimal|double|float|int|integer|numeric|real|smallint)/"
    | "/(?ai:text|time|timestamp|varchar)/"
    ;

NAME
    : "/[A-Za-z_][A-Za-z_0-9]*/"
    | '/"([^"\n]|"")+"/'
    ;
NUMBER: "/([0-9]+(\.[0-9]+)?|\.[0-9]+)([eE][+-]?[0-9]+)?/" ;
STRING: "/'([^']|'')*'/" ;
COMPARISON: "=" | "<>" | "!=" | "<" | "<=" | ">" | ">=" ;
OPERATOR: "/" | "%" | "||" ;

statement
    : query
    | query ";"
    | subquery
    | subquery ";"
    ;

query
    : body
    | body order
    | body limit
    | body order limit
    | WITH common_tables body
    | WITH common_tables body order
    | WITH common_tables body limit
    | WITH common_tables body order limit
    | WITH RECURSIVE common_tables body
    | WITH RECURSIVE common_tables body order
    | WITH RECURSIVE common_tables body limit
    | WITH RECURSIVE common_tables body order limit
    ;

common_tables
    : common_table
    | common_tables "," common_table
    ;

common_table
    : NAME AS subquery
    | NAME "(" names ")" AS subquery
    ;

names
    : NAME
    | names "," NAME
    ;

subquery: "(" query ")" ;

body
    : select
    | body set_operator operand
    | subquery set_operator operand
    ;

operand
    : select
    | subquery
    ;

set_operator
    : SET_OPERATOR
    | SET_OPERATOR ALL
    | SET_OPERATOR DISTINCT
    ;

select
    : SELECT quantifier items
    | SELECT quantifier items FROM tables where group
    ;

quantifier
    : %empty
    | ALL
    | DISTINCT
    ;

items
    : item
    | items "," item
    ;

item
    : "*"
    | column "." "*"
    | condition
    | condition NAME
    | condition AS NAME
    ;

tables
    : joined
    | tables "," joined
    ;

joined
    : table
    | joined CROSS JOIN table
    | joined join table ON condition
    | joined join table USING "(" names ")"
    ;

join
    : JOIN
    | INNER JOIN
    | SIDE JOIN
    | SIDE OUTER JOIN
    ;

table
    : table_name alias
    | subquery alias
    | "(" joined ")"
    ;

table_name
    : NAME
    | table_name "." NAME
    ;

alias
    : %empty
    | NAME
    | AS NAME
    | AS NAME "(" names ")"
    ;

where
    : %empty
    | WHERE condition
    ;

group
    : %empty
    | GROUP BY conditions
    | GROUP BY conditions HAVING condition
    ;

order: ORDER BY sort_keys ;

sort_keys
    : sort_key
    | sort_keys "," sort_key
    ;

sort_key
    : condition direction
    | condition direction NULLS FIRST_OR_LAST
    ;

direction
    : %empty
    | DIRECTION
    ;

limit
    : LIMIT NUMBER
    | LIMIT NUMBER OFFSET NUMBER
    ;

conditions
    : condition
    | conditions "," condition
    ;

condition
    : test
    | condition AND test
    | condition OR test
    ;

test
    : predicate
    | NOT test
    ;

predicate
    : value
    | value COMPARISON value
    | value IS NULL
    | value IS NOT NULL
    | value negation BETWEEN value AND value
    | value negation LIKE value
    | value negation LIKE value ESCAPE STRING
    | value negation IN subquery
    | value negation IN "(" conditions ")"
    | EXISTS subquery
    ;

negation
    : %empty
    | NOT
    ;

value
    : factor
    | value "+" factor
    | value "-" factor
    | value "*" factor
    | value OPERATOR factor
    ;

factor
    : primary
    | "-" factor
    | "+" factor
    ;

primary
    : column
    | NUMBER
    | STRING
    | NULL
    | TRUTH
    | call
    | call OVER "(" window ")"
    | CAST "(" condition AS type ")"
    | CASE whens else END
    | CASE condition whens else END
    | subquery
    | "(" condition ")"
    ;

column
    : NAME
    | column "." NAME
    ;

call
    : NAME "(" ")"
    | NAME "(" "*" ")"
    | NAME "(" conditions ")"
    | NAME "(" DISTINCT conditions ")"
    ;

window
    : partition
    | partition order
    ;

partition
    : %empty
    | PARTITION BY conditions
    ;

type
    : TYPE
    | TYPE "(" NUMBER ")"
    | TYPE "(" NUMBER "," NUMBER ")"
    ;

whens
    : WHEN condition THEN condition
    | whens WHEN condition THEN condition
    ;

else
    : %empty
    | ELSE condition
    ;
