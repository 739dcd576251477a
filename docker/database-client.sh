#!/bin/sh
# In the container of the tests: pg_dump and its like of the database's version, which this Debian does not have. They run
# from the database's container, whose processes are seen here (pid in compose.test.yaml); TMPDIR is the same there.
programs=$(cd /proc/1/root && echo usr/lib/postgresql/*/bin)
exec chroot /proc/1/root "/$programs/$(basename "$0")" "$@"
