package crdbdraintest

import (
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"math"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgtype"
)

const (
	oidBool        = pgtype.BoolOID
	oidBytes       = pgtype.ByteaOID
	oidInt8        = pgtype.Int8OID
	oidInt4        = pgtype.Int4OID
	oidInt2        = pgtype.Int2OID
	oidText        = pgtype.TextOID
	oidFloat8      = pgtype.Float8OID
	oidTimestamp   = pgtype.TimestampOID
	oidTimestamptz = pgtype.TimestamptzOID
	oidInterval    = pgtype.IntervalOID
)

// column is a column of a result.
type column struct {
	name string
	oid  uint32
}

func typeOf(v any) uint32 {
	switch v.(type) {
	case int, int64, int32, uint32:
		return oidInt8
	case float64:
		return oidFloat8
	case bool:
		return oidBool
	case []byte:
		return oidBytes
	case time.Time:
		return oidTimestamptz
	case time.Duration:
		return oidInterval
	}
	return oidText
}

func typeSize(oid uint32) int16 {
	switch oid {
	case oidBool:
		return 1
	case oidInt2:
		return 2
	case oidInt4:
		return 4
	case oidInt8, oidFloat8, oidTimestamp, oidTimestamptz:
		return 8
	case oidInterval:
		return 16
	}
	return -1
}

func castType(name string) uint32 {
	switch name {
	case "int", "int8", "integer", "bigint", "int64":
		return oidInt8
	case "int4":
		return oidInt4
	case "int2", "smallint":
		return oidInt2
	case "bool", "boolean":
		return oidBool
	case "float", "float8", "double":
		return oidFloat8
	case "bytes", "bytea":
		return oidBytes
	case "timestamp":
		return oidTimestamp
	case "timestamptz":
		return oidTimestamptz
	case "interval":
		return oidInterval
	}
	return oidText
}

// text is PostgreSQL's text form of a value.
func text(v any) string {
	switch v := v.(type) {
	case nil:
		return ""
	case string:
		return v
	case int64:
		return strconv.FormatInt(v, 10)
	case bool:
		if v {
			return "t"
		}
		return "f"
	case float64:
		return strconv.FormatFloat(v, 'g', -1, 64)
	case []byte:
		return `\x` + hex.EncodeToString(v)
	case time.Time:
		return v.Format("2006-01-02 15:04:05.999999999-07")
	case time.Duration:
		us := v.Microseconds()
		sign := ""
		if us < 0 {
			sign, us = "-", -us
		}
		t := fmt.Sprintf("%s%02d:%02d:%02d", sign, us/3600e6, us/60e6%60, us/1e6%60)
		if us%1e6 != 0 {
			t += fmt.Sprintf(".%06d", us%1e6)
		}
		return t
	}
	return fmt.Sprint(v)
}

// convert turns a value into the type that belongs to an OID; a value that does
// not fit stays as it is.
func convert(oid uint32, v any) any {
	if v == nil {
		return nil
	}
	if i, ok := v.(int); ok {
		v = int64(i)
	}
	switch oid {
	case oidInt8, oidInt4, oidInt2:
		switch x := v.(type) {
		case float64:
			return int64(math.RoundToEven(x))
		case bool:
			if x {
				return int64(1)
			}
			return int64(0)
		case string:
			if i, err := strconv.ParseInt(x, 10, 64); err == nil {
				return i
			}
		}
	case oidFloat8:
		switch x := v.(type) {
		case int64:
			return float64(x)
		case string:
			if f, err := strconv.ParseFloat(x, 64); err == nil {
				return f
			}
		}
	case oidBool:
		switch x := v.(type) {
		case string:
			if b, err := strconv.ParseBool(x); err == nil {
				return b
			}
		case int64:
			return x != 0
		}
	case oidBytes:
		if x, ok := v.(string); ok {
			return []byte(x)
		}
	case oidInterval:
		if x, ok := v.(string); ok {
			if d, err := time.ParseDuration(x); err == nil {
				return d
			}
		}
	case oidText:
		if b, ok := v.(bool); ok {
			return strconv.FormatBool(b) // a cast to STRING says true, not t
		}
		return text(v)
	}
	return v
}

var postgresEpoch = time.Date(2000, 1, 1, 0, 0, 0, 0, time.UTC)

// encode appends a value that is not nil in the text (0) or binary (1) format.
func encode(dst []byte, oid uint32, format int16, v any) []byte {
	if i, ok := v.(int64); ok && oid == oidInt8 { // the hot path
		if format == 0 {
			return strconv.AppendInt(dst, i, 10)
		}
		return binary.BigEndian.AppendUint64(dst, uint64(i))
	}
	v = convert(oid, v)
	if format == 0 {
		if t, ok := v.(time.Time); ok && oid == oidTimestamp {
			return t.UTC().AppendFormat(dst, "2006-01-02 15:04:05.999999")
		}
		return append(dst, text(v)...)
	}
	switch x := v.(type) {
	case int64:
		switch oid {
		case oidInt2:
			return binary.BigEndian.AppendUint16(dst, uint16(x))
		case oidInt4:
			return binary.BigEndian.AppendUint32(dst, uint32(x))
		}
		return binary.BigEndian.AppendUint64(dst, uint64(x))
	case float64:
		return binary.BigEndian.AppendUint64(dst, math.Float64bits(x))
	case bool:
		if x {
			return append(dst, 1)
		}
		return append(dst, 0)
	case []byte:
		return append(dst, x...)
	case time.Time:
		return binary.BigEndian.AppendUint64(dst, uint64(x.Sub(postgresEpoch).Microseconds()))
	case time.Duration:
		dst = binary.BigEndian.AppendUint64(dst, uint64(x.Microseconds()))
		return binary.BigEndian.AppendUint64(dst, 0) // days and months
	}
	return append(dst, text(v)...)
}

// decode reads a parameter.
func decode(oid uint32, format int16, b []byte) (any, error) {
	if b == nil {
		return nil, nil
	}
	bad := &pgconn.PgError{Code: "22P03", Message: fmt.Sprintf("could not parse a parameter of type %d", oid)}
	if format == 0 {
		switch v := convert(oid, string(b)).(type) {
		case string:
			switch oid {
			case oidInt8, oidInt4, oidInt2, oidFloat8, oidBool:
				bad.Code = "22P02"
				return nil, bad
			}
			return v, nil
		default:
			return v, nil
		}
	}
	if size := typeSize(oid); size > 0 && len(b) != int(size) {
		return nil, bad
	}
	switch oid {
	case oidInt8:
		return int64(binary.BigEndian.Uint64(b)), nil
	case oidInt4:
		return int64(int32(binary.BigEndian.Uint32(b))), nil
	case oidInt2:
		return int64(int16(binary.BigEndian.Uint16(b))), nil
	case oidFloat8:
		return math.Float64frombits(binary.BigEndian.Uint64(b)), nil
	case oidBool:
		return b[0] != 0, nil
	case oidText, pgtype.VarcharOID, pgtype.UnknownOID:
		return string(b), nil
	case oidTimestamp, oidTimestamptz:
		return postgresEpoch.Add(time.Duration(binary.BigEndian.Uint64(b)) * time.Microsecond), nil
	}
	return append([]byte(nil), b...), nil
}
