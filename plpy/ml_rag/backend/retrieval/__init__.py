"""A question is compiled: request and stores in, one SQL statement out, run by a plan that the session keeps.

``request`` reads the options, ``stores`` discovers what may be searched, ``plan`` writes the statement (a pure
function, without a database), ``run`` executes it and knows when another one is needed. What is not one statement is
left to the stages of sql/pipeline, store by store: rewriting, functions, node groups, shards, views, explain.
"""
