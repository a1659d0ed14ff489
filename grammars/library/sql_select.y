// One SELECT statement of SQL: joins, subqueries, WITH, set operations, CASE, CAST, windows.
//
// AND and OR are one list, and so are the operators between values: which binds tighter makes no
// difference to which texts are right. Keywords in any case.

%start statement
%reserved "/(?i:add|alter|any|array|begin|both|check|column|commit|constraint|create)/"
%reserved "/(?i:current|cursor|database|declare|default|delete|describe|div|drop)/"
%reserved "/(?i:execute|explain|fetch|filter|for|foreign|function|grant|if|ignore|index)/"
%reserved "/(?i:insert|interval|into|key|lateral|leading|lock|loop|map|match|merge)/"
%reserved "/(?i:natural|of|only|overlaps|pivot|primary|procedure|qualify|references)/"
%reserved "/(?i:regexp|replace|return|revoke|rlike|row|rows|schema|set|show|similar)/"
%reserved "/(?i:some|start|struct|table|tablesample|top|trailing|trigger|truncate)/"
%reserved "/(?i:unique|unnest|unpivot|update|use|values|view|window)/"
%%

SKIP: "/([ \t\r\n]+|--[^\n]*|\/\*[^*]*\*+([^\/*][^*]*\*+)*\/)/" ;

ALL: "/(?i:all)/" ;
AND: "/(?i:and)/" ;
AS: "/(?i:as)/" ;
BETWEEN: "/(?i:between)/" ;
BY: "/(?i:by)/" ;
CASE: "/(?i:case)/" ;
CAST: "/(?i:cast)/" ;
DIRECTION: "/(?i:asc|desc)/" ;
DISTINCT: "/(?i:distinct)/" ;
ELSE: "/(?i:else)/" ;
END: "/(?i:end)/" ;
ESCAPE: "/(?i:escape)/" ;
EXISTS: "/(?i:exists)/" ;
FROM: "/(?i:from)/" ;
GROUP: "/(?i:group)/" ;
HAVING: "/(?i:having)/" ;
IN: "/(?i:in)/" ;
IS: "/(?i:is)/" ;
CROSS: "/(?i:cross)/" ;
INNER: "/(?i:inner)/" ;
SIDE: "/(?i:left|right|full)/" ;
OUTER: "/(?i:outer)/" ;
JOIN: "/(?i:join)/" ;
LIKE: "/(?i:like)/" ;
LIMIT: "/(?i:limit)/" ;
NOT: "/(?i:not)/" ;
NULL: "/(?i:null)/" ;
NULLS: "/(?i:nulls)/" ;
FIRST_OR_LAST: "/(?i:first|last)/" ;
OFFSET: "/(?i:offset)/" ;
ON: "/(?i:on)/" ;
OR: "/(?i:or)/" ;
ORDER: "/(?i:order)/" ;
OVER: "/(?i:over)/" ;
PARTITION: "/(?i:partition)/" ;
RECURSIVE: "/(?i:recursive)/" ;
SELECT: "/(?i:select)/" ;
SET_OPERATOR: "/(?i:union|intersect|except)/" ;
THEN: "/(?i:then)/" ;
TRUTH: "/(?i:true|false)/" ;
USING: "/(?i:using)/" ;
WHEN: "/(?i:when)/" ;
WHERE: "/(?i:where)/" ;
WITH: "/(?i:with)/" ;
TYPE
    : "/(?i:bigint|blob|boolean|char|date|decimal|double|float|int|integer|numeric|real|smallint)/"
    | "/(?i:text|time|timestamp|varchar)/"
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
