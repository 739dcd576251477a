-- functions: what a statement that a model wrote may call, by exact signature; each was looked through.
--
-- Built-in ones that compute a value of their arguments, the clock and the settings of dates, locale and text
-- search alone, look for interrupts or end within a second whatever they are given, and call no function or
-- cast that a user defined. How large the arguments of some may be is in backend/sizes.py. Not here, for what
-- they could do: polygons and paths (crossing two of 60 000 points takes minutes), normalize (quadratic),
-- making JSON and quote_literal of any type (casts of the type's owner), whatever tells of the catalog,
-- sessions, files or settings, and what runs a query given as text.

CREATE TABLE ml_rag.callable_function (
  name      name NOT NULL,
  arguments text NOT NULL,   -- their types, without schemas
  extension text NOT NULL,   -- '' of those of PostgreSQL itself
  PRIMARY KEY (name, arguments, extension)
);
COMMENT ON TABLE ml_rag.callable_function IS 'functions that statements of ml_nl_sql may call, also by way '
  'of operators and casts';

INSERT INTO ml_rag.callable_function (name, arguments, extension)
SELECT n.name,
  regexp_replace(regexp_replace(a.arguments, '\m(time|timestamp)\M', '\1 without time zone', 'g'),
  '\m(time|timestamp)tz\M', '\1 with time zone', 'g'), f.extension
FROM (VALUES
  ('', $$
-- aggregates and window functions
any_value first_value last_value mode(anyelement)  array_agg(anyarray; anynonarray)
  avg(bigint; double precision; integer; interval;
numeric; real; smallint)  bit_and bit_or bit_xor(bigint; bit; integer; smallint)  bool_and bool_or
  every(boolean)  corr covar_pop covar_samp
regr_avgx regr_avgy regr_count regr_intercept regr_r2 regr_slope regr_sxx regr_sxy regr_syy(double precision,
  double precision)  count
cume_dist dense_rank percent_rank rank(; "any")  lag lead(anycompatible, integer,
  anycompatible; anyelement; anyelement, integer)  max
min(anyarray; anyenum; bigint; character; date; double precision; inet; integer; interval; money; numeric;
  oid; real; smallint; text;
timetz; time; timestamptz; timestamp)  nth_value(anyelement,
  integer)  ntile(integer)  percentile_cont(double precision, double precision;
double precision, interval; double precision[], double precision; double precision[],
interval)  percentile_disc(double precision,
anyelement; double precision[],
anyelement)  range_intersect_agg(anyrange)  row_number()  stddev stddev_pop stddev_samp var_pop var_samp
variance(bigint; double precision; integer; numeric; real; smallint)  string_agg(bytea, bytea; text,
  text)  sum(bigint; double precision;
integer; interval; money; numeric; real; smallint)

-- numbers and booleans
abs(bigint; double precision; integer; numeric; real; smallint)  acos acosd acosh asin asind asinh atan atand
  atanh cbrt cos cosd cosh cot
cotd dcbrt degrees dexp dlog1 dlog10 dround dsqrt dtrunc erf erfc float8abs float8um float8up radians sin
  sind sinh tan tand tanh(double
precision)  atan2 atan2d dpow float8div float8eq float8ge float8gt float8larger float8le float8lt float8mi
  float8mul float8ne float8pl
float8smaller point(double precision, double precision)  bit(bigint, integer; integer,
  integer)  bool char chr int4abs int4inc int4not
int4um int4up(integer)  booleq boolge boolgt boolle boollt boolne(boolean,
  boolean)  cash_cmp cash_div_cash cash_eq cash_ge cash_gt cash_le
cash_lt cash_mi cash_ne cash_pl cashlarger cashsmaller(money, money)  cash_div_flt4 cash_mul_flt4(money,
  real)  cash_div_flt8
cash_mul_flt8(money, double precision)  cash_div_int2 cash_mul_int2(money,
  smallint)  cash_div_int4 cash_mul_int4(money, integer)
cash_div_int8 cash_mul_int8(money,
  bigint)  cash_words(money)  ceil ceiling exp floor ln log10 sign sqrt(double precision; numeric)  div
numeric_add numeric_cmp numeric_div numeric_div_trunc numeric_eq numeric_ge numeric_gt numeric_larger
  numeric_le numeric_log numeric_lt
numeric_mod numeric_mul numeric_ne numeric_power numeric_smaller numeric_sub(numeric,
  numeric)  factorial int8abs int8inc int8not int8um
int8up oid(bigint)  float4(bigint; double precision; integer; numeric; smallint)  float48div float48eq
  float48ge float48gt float48le
float48lt float48mi float48mul float48ne float48pl(real,
  double precision)  float4abs float4um float4up(real)  float4div float4eq float4ge
float4gt float4larger float4le float4lt float4mi float4mul float4ne float4pl float4smaller(real,
  real)  float8(bigint; integer; numeric;
real; smallint)  float84div float84eq float84ge float84gt float84le float84lt float84mi float84mul float84ne
  float84pl(double precision,
real)  flt4_mul_cash(real, money)  flt8_mul_cash(double precision, money)  gcd lcm(bigint, bigint; integer,
integer; numeric, numeric)
generate_series(bigint, bigint; bigint, bigint, bigint; integer, integer; integer, integer, integer; numeric,
  numeric; numeric, numeric,
numeric)  int2(bigint; double precision; integer; numeric; real)  int24div int24eq int24ge int24gt int24le
  int24lt int24mi int24mul int24ne
int24pl int2shl int2shr(smallint,
  integer)  int28div int28eq int28ge int28gt int28le int28lt int28mi int28mul int28ne int28pl(smallint,
bigint)  int2_mul_cash(smallint,
money)  int2abs int2not int2um int2up(smallint)  int2and int2div int2eq int2ge int2gt int2larger int2le
int2lt int2mi int2mod int2mul int2ne int2or int2pl int2smaller int2xor(smallint,
  smallint)  int4(bigint; boolean; double precision; numeric;
real; smallint)  int42div int42eq int42ge int42gt int42le int42lt int42mi int42mul int42ne int42pl(integer,
  smallint)  int48div int48eq
int48ge int48gt int48le int48lt int48mi int48mul int48ne int48pl(integer, bigint)  int4_mul_cash(integer,
  money)  int4and int4div int4eq
int4ge int4gt int4larger int4le int4lt int4mi int4mod int4mul int4ne int4or int4pl int4shl int4shr
  int4smaller int4xor(integer, integer)
int8(double precision; integer; numeric; oid; real; smallint)  int82div int82eq int82ge int82gt int82le
  int82lt int82mi int82mul int82ne
int82pl(bigint,
  smallint)  int84div int84eq int84ge int84gt int84le int84lt int84mi int84mul int84ne int84pl int8shl
    int8shr(bigint,
integer)  int8_mul_cash(bigint,
money)  int8and int8div int8eq int8ge int8gt int8larger int8le int8lt int8mi int8mod int8mul int8ne int8or
int8pl int8smaller int8xor(bigint, bigint)  int8inc_float8_float8(bigint, double precision,
  double precision)  log(double precision;
numeric; numeric,
  numeric)  min_scale numeric_abs numeric_exp numeric_inc numeric_ln numeric_sqrt numeric_uminus
    numeric_uplus scale
trim_scale(numeric)  mod(bigint, bigint; integer, integer; numeric, numeric; smallint,
  smallint)  money(bigint; integer; numeric)
numeric(bigint; double precision; integer; money; numeric,
  integer; real; smallint)  oideq oidge oidgt oidlarger oidle oidlt oidne
oidsmaller(oid, oid)  pg_size_pretty(bigint; numeric)  pi()  pow power(double precision,
  double precision; numeric, numeric)  round
trunc(double precision; numeric; numeric,
  integer)  text(boolean)  to_bin to_hex to_oct(bigint; integer)  width_bucket(double precision,
double precision, double precision, integer; numeric, numeric, numeric, integer)

-- dates and times
age(timestamptz; timestamptz, timestamptz; timestamp; timestamp,
  timestamp)  date(timestamptz; timestamp)  date_add
date_subtract(timestamptz, interval; timestamptz, interval, text)  date_bin(interval, timestamptz,
  timestamptz; interval, timestamp,
timestamp)  date_cmp date_eq date_ge date_gt date_larger date_le date_lt date_mi date_ne date_smaller(date,
date)  date_cmp_timestamp
date_eq_timestamp date_ge_timestamp date_gt_timestamp date_le_timestamp date_lt_timestamp
  date_ne_timestamp(date, timestamp)
date_cmp_timestamptz date_eq_timestamptz date_ge_timestamptz date_gt_timestamptz date_le_timestamptz
  date_lt_timestamptz
date_ne_timestamptz(date, timestamptz)  date_mi_interval date_pl_interval(date,
  interval)  date_mii date_pli(date, integer)  date_part
extract(text, date; text, interval; text, timetz; text, time; text, timestamptz; text,
  timestamp)  date_trunc(text, interval; text,
timestamptz; text, timestamptz, text; text, timestamp)  datetime_pl(date, time)  datetimetz_pl(date,
timetz)  generate_series(timestamptz,
timestamptz, interval; timestamptz, timestamptz, interval, text; timestamp, timestamp,
interval)  integer_pl_date(integer, date)
interval(interval,
  integer; time)  interval_cmp interval_eq interval_ge interval_gt interval_larger interval_le
    interval_lt interval_mi
interval_ne interval_pl interval_smaller(interval, interval)  interval_div interval_mul(interval,
  double precision)
interval_pl_date(interval, date)  interval_pl_time(interval, time)  interval_pl_timestamp(interval, timestamp)
interval_pl_timestamptz(interval, timestamptz)  interval_pl_timetz(interval,
  timetz)  interval_um justify_days justify_hours
justify_interval(interval)  isfinite(date; interval; timestamptz; timestamp)  make_date(integer, integer,
  integer)  make_interval(integer,
integer, integer, integer, integer, integer, double precision)  make_time(integer, integer,
double precision)  make_timestamp(integer,
integer, integer, integer, integer, double precision)  make_timestamptz(integer, integer, integer, integer,
integer, double precision;
integer, integer, integer, integer, integer, double precision, text)  mul_d_interval(double precision,
  interval)  now statement_timestamp
transaction_timestamp()  overlaps(timetz, timetz, timetz, timetz; time, interval, time, interval; time,
  interval, time, time; time, time,
time, interval; time, time, time, time; timestamptz, interval, timestamptz, interval; timestamptz, interval,
timestamptz, timestamptz;
timestamptz, timestamptz, timestamptz, interval; timestamptz, timestamptz, timestamptz,
timestamptz; timestamp, interval, timestamp,
interval; timestamp, interval, timestamp, timestamp; timestamp, timestamp, timestamp, interval; timestamp,
timestamp, timestamp, timestamp)
time(interval; timetz; time,
  integer; timestamptz; timestamp)  time_cmp time_eq time_ge time_gt time_larger time_le time_lt time_mi_time
time_ne time_smaller(time, time)  time_mi_interval time_pl_interval(time, interval)  timedate_pl(time,
  date)  timestamp(date; date, time;
timestamptz; timestamp,
  integer)  timestamp_cmp timestamp_eq timestamp_ge timestamp_gt timestamp_larger timestamp_le timestamp_lt
timestamp_mi timestamp_ne timestamp_smaller(timestamp,
  timestamp)  timestamp_cmp_date timestamp_eq_date timestamp_ge_date timestamp_gt_date
timestamp_le_date timestamp_lt_date timestamp_ne_date(timestamp,
  date)  timestamp_cmp_timestamptz timestamp_eq_timestamptz
timestamp_ge_timestamptz timestamp_gt_timestamptz timestamp_le_timestamptz timestamp_lt_timestamptz
  timestamp_ne_timestamptz(timestamp,
timestamptz)  timestamp_mi_interval timestamp_pl_interval(timestamp, interval)  timestamptz(date; date,
timetz; date, time; timestamptz,
integer; timestamp)  timestamptz_cmp timestamptz_eq timestamptz_ge timestamptz_gt timestamptz_larger
  timestamptz_le timestamptz_lt
timestamptz_mi timestamptz_ne timestamptz_smaller(timestamptz,
  timestamptz)  timestamptz_cmp_date timestamptz_eq_date timestamptz_ge_date
timestamptz_gt_date timestamptz_le_date timestamptz_lt_date timestamptz_ne_date(timestamptz,
  date)  timestamptz_cmp_timestamp
timestamptz_eq_timestamp timestamptz_ge_timestamp timestamptz_gt_timestamp timestamptz_le_timestamp
  timestamptz_lt_timestamp
timestamptz_ne_timestamp(timestamptz,
  timestamp)  timestamptz_mi_interval timestamptz_pl_interval(timestamptz, interval)  timetz(timetz,
integer; time; timestamptz)  timetz_cmp timetz_eq timetz_ge timetz_gt timetz_larger timetz_le timetz_lt
  timetz_ne timetz_smaller(timetz,
timetz)  timetz_mi_interval timetz_pl_interval(timetz, interval)  timetzdate_pl(timetz,
date)  timezone(interval, timetz; interval,
timestamptz; interval, timestamp; text, timetz; text, timestamptz; text,
timestamp; timetz; timestamptz; timestamp)  to_char(interval, text;
timestamptz, text; timestamp, text)  to_date(text, text)  to_timestamp(double precision; text, text)

-- texts, bytes and bits
anytextcat(anynonarray,
  text)  ascii casefold char initcap lower pg_size_bytes quote_ident quote_literal quote_nullable
    reverse textlen
unistr upper(text)  bit(bit, integer,
  boolean)  bit_count(bit; bytea)  bit_length(bit; bytea; text)  bitand bitcmp biteq bitge bitgt bitle
bitlt bitne bitor bitxor(bit,
  bit)  bitcat varbitcmp varbiteq varbitge varbitgt varbitle varbitlt varbitne(bit varying,
    bit varying)  bitnot
int8(bit)  bitshiftleft bitshiftright(bit, integer)  bpchar("char"; character, integer,
  boolean; name)  bpchar_larger bpchar_pattern_ge
bpchar_pattern_gt bpchar_pattern_le bpchar_pattern_lt bpchar_smaller bpcharcmp bpchareq bpcharge bpchargt
  bpcharle bpcharlt
bpcharne(character,
  character)  bpchariclike bpcharicnlike bpcharicregexeq bpcharicregexne bpcharlike bpcharnlike bpcharregexeq
bpcharregexne(character, text)  btrim ltrim rtrim(bytea, bytea; text; text,
  text)  byteacat byteacmp byteaeq byteage byteagt byteale bytealt
byteane(bytea,
  bytea)  char_length character_length(character; text)  chareq charge chargt charle charlt charne("char",
    "char")
concat_ws(text, "any")  convert_from(bytea,
  name)  convert_to texteqname textgename textgtname textlename textltname textnename(text, name)
decode like_escape similar_escape starts_with strpos text_ge text_gt text_larger text_le text_lt
  text_pattern_ge text_pattern_gt
text_pattern_le text_pattern_lt text_smaller textcat texteq texticlike texticnlike texticregexeq
  texticregexne textlike textne textnlike
textregexeq textregexne to_number ts_match_tt(text, text)  encode(bytea, text)  format(text; text,
  "any")  get_bit(bit, integer; bytea,
bigint)  get_byte(bytea, integer)  int4("char"; bit)  left repeat right(text,
integer)  length(bit; bytea; bytea, name; character; text)
lpad rpad(text, integer; text, integer,
  text)  md5(bytea; text)  name(character; character varying; text)  nameconcatoid(name, oid)  nameeq
namege namegt namele namelt namene(name,
  name)  nameeqtext namegetext namegttext nameiclike nameicnlike nameicregexeq nameicregexne
nameletext namelike namelttext namenetext namenlike nameregexeq nameregexne(name,
  text)  octet_length(bit; bytea; character; text)
overlay(bit, bit, integer; bit, bit, integer, integer; bytea, bytea, integer; bytea, bytea, integer,
  integer; text, text, integer; text,
text, integer, integer)  parse_ident(text, boolean)  position(bytea, bytea; text, text)  regexp_count(text,
text; text, text, integer; text,
text, integer, text)  regexp_instr(text, text; text, text, integer; text, text, integer, integer; text, text,
integer, integer, integer;
text, text, integer, integer, integer, text; text, text, integer, integer, integer, text,
  integer)  regexp_like regexp_match regexp_matches
regexp_split_to_array regexp_split_to_table string_to_array string_to_table(text, text; text, text,
  text)  regexp_replace(text, text, text;
text, text, text, integer; text, text, text, integer, integer; text, text, text, integer, integer,
  text; text, text, text, text)
regexp_substr(text, text; text, text, integer; text, text, integer, integer; text, text, integer, integer,
  text; text, text, integer,
integer, text, integer)  replace translate(text, text, text)  set_bit(bit, integer, integer; bytea, bigint,
integer)  set_byte(bytea,
integer, integer)  sha224 sha256 sha384 sha512(bytea)  similar_to_escape(text; text, text)  split_part(text,
text, integer)  substr(bytea,
integer; bytea, integer, integer; text, integer; text, integer, integer)  substring(bit, integer; bit,
integer, integer; bytea, integer;
bytea, integer, integer; text, integer; text, integer, integer; text, text; text, text,
  text)  text("char"; character; name)
textanycat(text, anynonarray)  to_ascii(text; text, integer; text, name)  to_char(bigint,
  text; double precision, text; integer, text;
numeric, text; real, text)  varbit(bit varying, integer, boolean)  varchar(character varying, integer,
  boolean; name)

-- arrays
array_append array_positions array_remove(anycompatiblearray, anycompatible)  array_cat(anycompatiblearray,
  anycompatiblearray)  array_dims
array_ndims array_reverse cardinality unnest(anyarray)  array_eq array_ge array_gt array_larger array_le
  array_lt array_ne array_smaller
arraycontained arraycontains arrayoverlap(anyarray, anyarray)  array_fill(anyelement, integer[]; anyelement,
  integer[], integer[])
array_length array_lower array_upper trim_array(anyarray, integer)  array_position(anycompatiblearray,
  anycompatible; anycompatiblearray,
anycompatible, integer)  array_prepend width_bucket(anycompatible,
anycompatiblearray)  array_replace(anycompatiblearray, anycompatible,
anycompatible)  array_to_string(anyarray, text; anyarray, text, text)  generate_subscripts(anyarray,
integer; anyarray, integer, boolean)
json_object jsonb_object(text[]; text[], text[])

-- JSON that is there already
bool float4 float8 int2 int4 int8 jsonb_array_elements jsonb_array_elements_text jsonb_array_length
  jsonb_each jsonb_each_text
jsonb_object_keys jsonb_pretty jsonb_strip_nulls jsonb_typeof numeric(jsonb)  json_array_element
  json_array_element_text(json, integer)
json_array_elements json_array_elements_text json_array_length json_each json_each_text json_object_keys
  json_strip_nulls json_typeof(json)
json_extract_path json_extract_path_text(json, text[])  json_object_field json_object_field_text(json,
  text)  jsonb_array_element
jsonb_array_element_text(jsonb,
  integer)  jsonb_cmp jsonb_concat jsonb_contained jsonb_contains jsonb_eq jsonb_ge jsonb_gt jsonb_le jsonb_lt
jsonb_ne(jsonb, jsonb)  jsonb_delete(jsonb, integer; jsonb, text; jsonb,
  text[])  jsonb_delete_path jsonb_exists_all jsonb_exists_any
jsonb_extract_path jsonb_extract_path_text(jsonb,
  text[])  jsonb_exists jsonb_object_field jsonb_object_field_text(jsonb, text)
jsonb_insert jsonb_set(jsonb, text[], jsonb,
  boolean)  jsonb_path_exists jsonb_path_exists_tz jsonb_path_match jsonb_path_match_tz
jsonb_path_query jsonb_path_query_array jsonb_path_query_array_tz jsonb_path_query_first
  jsonb_path_query_first_tz
jsonb_path_query_tz(jsonb, jsonpath, jsonb, boolean)  jsonb_path_exists_opr jsonb_path_match_opr(jsonb,
  jsonpath)  jsonb_set_lax(jsonb,
text[], jsonb, boolean, text)

-- text search
length strip tsvector_to_array unnest(tsvector)  numnode querytree tsquery_not(tsquery)  phraseto_tsquery
  plainto_tsquery to_tsquery
websearch_to_tsquery(regconfig, text; text)  setweight(tsvector, "char"; tsvector, "char",
  text[])  to_tsvector(json; jsonb; regconfig,
json; regconfig, jsonb; regconfig, text; text)  ts_headline(json, tsquery; json, tsquery, text; jsonb,
tsquery; jsonb, tsquery, text;
regconfig, json, tsquery; regconfig, json, tsquery, text; regconfig, jsonb, tsquery; regconfig, jsonb,
tsquery, text; regconfig, text,
tsquery; regconfig, text, tsquery, text; text, tsquery; text, tsquery, text)  ts_match_qv(tsquery,
tsvector)  ts_match_tq(text, tsquery)
ts_match_vq(tsvector, tsquery)  ts_rank ts_rank_cd(real[], tsvector, tsquery; real[], tsvector, tsquery,
  integer; tsvector, tsquery;
tsvector, tsquery,
integer)  tsquery_and tsquery_cmp tsquery_eq tsquery_ge tsquery_gt tsquery_le tsquery_lt tsquery_ne
  tsquery_or(tsquery,
tsquery)  tsquery_phrase(tsquery, tsquery; tsquery, tsquery,
integer)  tsvector_cmp tsvector_concat tsvector_eq tsvector_ge tsvector_gt
tsvector_le tsvector_lt tsvector_ne(tsvector, tsvector)

-- ranges
daterange(date, date; date, date, text)  elem_contained_by_range(anyelement,
  anyrange)  enum_range(anyenum; anyenum, anyenum)
in_range(bigint, bigint, bigint, boolean, boolean; date, date, interval, boolean, boolean; double precision,
  double precision, double
precision, boolean, boolean; integer, integer, bigint, boolean, boolean; integer, integer, integer, boolean,
boolean; integer, integer,
smallint, boolean, boolean; interval, interval, interval, boolean, boolean; numeric, numeric, numeric,
boolean, boolean; real, real, double
precision, boolean, boolean; smallint, smallint, bigint, boolean, boolean; smallint, smallint, integer,
boolean, boolean; smallint,
smallint, smallint, boolean, boolean; timetz, timetz, interval, boolean, boolean; time, time, interval,
boolean, boolean; timestamptz,
timestamptz, interval, boolean, boolean; timestamp, timestamp, interval, boolean,
boolean)  int4range(integer, integer; integer, integer,
text)  int8range(bigint, bigint; bigint, bigint,
text)  isempty lower lower_inc lower_inf upper upper_inc upper_inf(anyrange)
numrange(numeric, numeric; numeric, numeric,
  text)  range_adjacent range_after range_before range_cmp range_contained_by range_contains
range_eq range_ge range_gt range_intersect range_le range_lt range_merge range_minus range_ne range_overlaps
  range_overleft range_overright
range_union(anyrange, anyrange)  range_contains_elem(anyrange, anyelement)  tsrange(timestamp,
  timestamp; timestamp, timestamp, text)
tstzrange(timestamptz, timestamptz; timestamptz, timestamptz, text)

-- geometry of fixed size: a point, a line, a box, a circle
area center(box; circle)  bound_box box_above box_above_eq box_below box_below_eq box_contain box_contained
  box_distance box_eq box_ge
box_gt box_intersect box_le box_left box_lt box_overabove box_overbelow box_overlap box_overleft
  box_overright box_right box_same(box, box)
box(circle; point; point, point)  box_add box_contain_pt box_div box_mul box_sub dist_bp(box,
  point)  box_center diagonal height width(box)
circle(box; point,
  double precision)  circle_above circle_below circle_contain circle_contained circle_distance
    circle_eq circle_ge
circle_gt circle_le circle_left circle_lt circle_ne circle_overabove circle_overbelow circle_overlap
  circle_overleft circle_overright
circle_right circle_same(circle,
  circle)  circle_add_pt circle_contain_pt circle_div_pt circle_mul_pt circle_sub_pt dist_cpoint(circle,
point)  circle_center diameter radius(circle)  close_ls dist_ls(line,
lseg)  close_lseg lseg_distance lseg_eq lseg_ge lseg_gt lseg_interpt
lseg_intersect lseg_le lseg_lt lseg_ne lseg_parallel lseg_perp(lseg, lseg)  close_pb dist_pb on_pb(point,
  box)  close_pl dist_pl
on_pl(point, line)  close_ps dist_ps on_ps(point, lseg)  close_sb dist_sb inter_sb on_sb(lseg,
  box)  dist_bs(box, lseg)  dist_lp(line,
point)  dist_pc pt_contained_circle(point, circle)  dist_sl inter_sl on_sl(lseg, line)  dist_sp(lseg,
point)  inter_lb(line, box)
ishorizontal isvertical(line; lseg; point, point)  isparallel isperp(line, line; lseg,
  lseg)  length lseg_center lseg_horizontal lseg_length
lseg_vertical(lseg)  line point_above point_add point_below point_distance point_div point_eq point_horiz
  point_left point_mul point_ne
point_right point_sub point_vert slope(point,
  point)  line_distance line_eq line_interpt line_intersect line_parallel line_perp(line, line)
line_horizontal line_vertical(line)  lseg(box; point, point)  point(box; circle; lseg)

-- addresses of networks
abbrev(cidr; inet)  broadcast cidr family host hostmask inetnot masklen netmask network text(inet)
  inet_merge inet_same_family inetand
inetmi inetor network_cmp network_eq network_ge network_gt network_larger network_le network_lt network_ne
  network_overlap network_smaller
network_sub network_subeq network_sup network_supeq(inet, inet)  inetmi_int8 inetpl(inet,
  bigint)  int8pl_inet(bigint, inet)  macaddr
macaddr8_not macaddr8_set7bit(macaddr8)  macaddr8 macaddr_not(macaddr)  macaddr8_and macaddr8_cmp macaddr8_eq
  macaddr8_ge macaddr8_gt
macaddr8_le macaddr8_lt macaddr8_ne macaddr8_or(macaddr8,
  macaddr8)  macaddr_and macaddr_cmp macaddr_eq macaddr_ge macaddr_gt macaddr_le
macaddr_lt macaddr_ne macaddr_or(macaddr, macaddr)  trunc(macaddr; macaddr8)

-- others: any type, records, UUIDs, enums
concat num_nonnulls num_nulls("any")  enum_cmp enum_eq enum_ge enum_gt enum_larger enum_le enum_lt enum_ne
  enum_smaller(anyenum, anyenum)
enum_first enum_last(anyenum)  int8inc_any(bigint,
  "any")  record_eq record_ge record_gt record_le record_lt record_ne(record, record)
uuid_cmp uuid_eq uuid_ge uuid_gt uuid_le uuid_lt uuid_ne(uuid,
  uuid)  uuid_extract_timestamp uuid_extract_version(uuid)
$$),
  ('citext', $$
citext(boolean; character; inet)  citext_cmp citext_eq citext_ge citext_gt citext_larger citext_le citext_lt
  citext_ne citext_pattern_cmp
citext_pattern_ge citext_pattern_gt citext_pattern_le citext_pattern_lt citext_smaller(citext,
  citext)  max min(citext)  texticlike
texticnlike texticregexeq texticregexne(citext, citext; citext, text)
$$),
  ('fuzzystrmatch', $$
difference(text, text)  dmetaphone dmetaphone_alt soundex(text)  levenshtein(text, text; text, text, integer,
  integer, integer)
levenshtein_less_equal(text, text, integer; text, text, integer, integer, integer,
  integer)  metaphone(text, integer)
$$),
  ('hstore', $$
akeys avals each hstore_to_array hstore_to_json hstore_to_json_loose hstore_to_jsonb hstore_to_jsonb_loose
  skeys svals(hstore)  defined
delete exist fetchval isdefined isexists(hstore,
  text)  hs_concat hs_contained hs_contains hstore_cmp hstore_eq hstore_ge hstore_gt
hstore_le hstore_lt hstore_ne(hstore, hstore)  hstore tconvert(text, text)
$$),
  ('intarray', $$
_int_contained _int_contains _int_different _int_overlap _int_same(integer[], integer[])  icount(integer[])
$$),
  ('pg_trgm', $$
show_trgm(text)  similarity similarity_dist similarity_op(text, text)
$$),
  ('unaccent', $$
unaccent(regdictionary, text; text)
$$),
  ('vector', $$
array_to_halfvec array_to_sparsevec array_to_vector(double precision[], integer, boolean; integer[], integer,
  boolean; numeric[], integer,
boolean; real[], integer,
boolean)  avg binary_quantize sum vector_dims(halfvec; vector)  cosine_distance inner_product l1_distance
l2_distance(halfvec, halfvec; sparsevec, sparsevec; vector,
  vector)  halfvec halfvec_to_float4 halfvec_to_sparsevec
halfvec_to_vector(halfvec, integer,
  boolean)  halfvec_add halfvec_cmp halfvec_concat halfvec_eq halfvec_ge halfvec_gt
halfvec_l2_squared_distance halfvec_le halfvec_lt halfvec_mul halfvec_ne halfvec_negative_inner_product
  halfvec_spherical_distance
halfvec_sub(halfvec, halfvec)  hamming_distance jaccard_distance(bit,
  bit)  l2_norm(halfvec; sparsevec)  l2_normalize(halfvec; sparsevec;
vector)  sparsevec sparsevec_to_halfvec sparsevec_to_vector(sparsevec, integer,
  boolean)  sparsevec_cmp sparsevec_eq sparsevec_ge
sparsevec_gt sparsevec_l2_squared_distance sparsevec_le sparsevec_lt sparsevec_ne
  sparsevec_negative_inner_product(sparsevec, sparsevec)
subvector(halfvec, integer, integer; vector, integer,
  integer)  vector vector_to_float4 vector_to_halfvec vector_to_sparsevec(vector,
integer,
boolean)  vector_add vector_cmp vector_concat vector_eq vector_ge vector_gt vector_l2_squared_distance
  vector_le vector_lt
vector_mul vector_ne vector_negative_inner_product vector_spherical_distance vector_sub(vector,
  vector)  vector_norm(vector)
$$)
) AS f (extension, list)
-- names, and of each the lists of arguments
CROSS JOIN LATERAL regexp_matches(regexp_replace(f.list, '--[^\n]*', '', 'g'),
  '([^()]+)\(([^)]*)\)', 'g') AS s
CROSS JOIN LATERAL regexp_split_to_table(btrim(s[1], E' \n'), '\s+') AS n (name)
CROSS JOIN LATERAL regexp_split_to_table(regexp_replace(s[2], '\s+', ' ', 'g'), '; ') AS a (arguments);
