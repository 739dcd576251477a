"""A question is compiled: request and stores in, one SQL statement out, run by a plan that the session keeps.

``request`` reads the options, ``stores`` discovers what may be searched, ``plan`` writes the statement (a pure
function, without a database), ``search`` does what comes before it and executes it, ``run`` is all of a retrieval.
"""
