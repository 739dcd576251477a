# update.awk -v migrations=FILE is=old RELEASED FILE is=new BUILT: the script of ALTER EXTENSION ml_rag UPDATE.
# RELEASED and BUILT are full scripts of the old and the new version, FILE has what comes first: the migrations.
# migrations/README.md says what becomes of which statement.

# Each statement of the three files goes through statement(); `--` comments between them are left out.
FNR == 1 && text != "" { fail("the file before it ends inside of a statement: " text) }
{ read_line($0) }
END {
  if (failed) exit 1
  if (text != "") fail("the file ends inside of a statement: " text)
  if (!inserted) fail("nothing sets the search_path in front of the first object")
}

function read_line(line,   rest, token, at) {
  if (text == "" && line ~ /^([ \t]*(--.*)?|\\echo .*)$/) return
  text = text line "\n"
  rest = line
  while (1) {
    if (quote != "") {
      at = index(rest, quote)
      if (!at) return
      rest = substr(rest, at + length(quote))
      quote = ""
      continue
    }
    if (!match(rest, /--|\/\*|'|"|\$[A-Za-z_]*\$|;/)) return
    token = substr(rest, RSTART, RLENGTH)
    rest = substr(rest, RSTART + RLENGTH)
    if (token == "--") return
    if (token == ";") {
      if (rest !~ /^[ \t]*(--.*)?$/) fail("two statements share a line: " line)
      statement(text)
      text = ""
      return
    }
    quote = token == "/*" ? "*/" : token
  }
}

function statement(body,   name) {
  if (is == "old") {
    known[body] = 1
    if (named(body)) known[named(body)] = 1
    return
  }
  if (body ~ /^(SET LOCAL|SELECT set_config|DO|COMMENT ON|GRANT|REVOKE)[ \n]/ || body ~ /^SELECT set_config\(/) {
    print body
  } else if (body ~ /^CREATE (FUNCTION|PROCEDURE|VIEW) /) {
    sub(/^CREATE /, "CREATE OR REPLACE ", body)
    print body
  } else if (body ~ /^CREATE MATERIALIZED VIEW /) {
    if (!(body in known)) {
      name = named(body)
      sub(/^MATERIALIZED VIEW /, "", name)
      remade[name] = 1
      if (named(body) in known) print "DROP MATERIALIZED VIEW " name ";\n"
      print body
    }
  } else if (body ~ /^CREATE (SCHEMA|TABLE|TYPE|SEQUENCE) /) {
    if (!(named(body) in known)) print body
  } else if (body ~ /^CREATE (UNIQUE )?INDEX /) {
    match(body, / ON [^ (]+/)
    if (!(body in known) || substr(body, RSTART + 4, RLENGTH - 4) in remade) print body
  } else if (body ~ /^CREATE TRIGGER /) {
    if (!(body in known)) { sub(/^CREATE /, "CREATE OR REPLACE ", body); print body }
  } else if (body ~ /^(CREATE (POLICY|EVENT TRIGGER)|ALTER TABLE|SELECT pg_catalog.pg_extension_config_dump)[ (]/) {
    if (!(body in known)) print body
  } else {
    fail("mk/update.awk does not know what an upgrade shall do with this statement: " body)
  }
  if (body ~ /^SELECT set_config\('search_path'/ && !inserted++) {
    while ((getline line < migrations) > 0) print line
  }
}

# Kind and name of an object that a migration changes, if anything does; "" of others.
function named(body) {
  if (!match(body, /^CREATE (SCHEMA|TABLE|TYPE|SEQUENCE|MATERIALIZED VIEW) (IF NOT EXISTS )?[^ (;\n]+/)) return ""
  body = substr(body, 8, RLENGTH - 7)
  sub(/ IF NOT EXISTS/, "", body)
  return body
}

function fail(why) {
  failed = 1
  print "ml_rag: " FILENAME ": " why > "/dev/stderr"
  exit 1
}
