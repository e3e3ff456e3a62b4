package interop

import (
	"testing"

	"github.com/DATA-DOG/go-sqlmock"

	"github.com/crdbdrain/crdbdrain"
)

// E10: sqlmock is a driver of its own and takes this one's place. A service that uses the driver's functions on a
// *sql.DB gets their answer for a foreign connection, and sqlmock's expectations hold.
func TestE10Sqlmock(t *testing.T) {
	db, mock, err := sqlmock.New()
	if err != nil {
		t.Fatal(err)
	}
	mock.ExpectBegin()
	mock.ExpectExec("INSERT INTO items").WithArgs(7, "item 7").WillReturnResult(sqlmock.NewResult(0, 1))
	mock.ExpectCommit()
	mock.ExpectClose()

	conn, err := db.Conn(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	leave := crdbdrain.Draining(t.Context(), conn)
	tx, err := conn.BeginTx(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := tx.Exec("INSERT INTO items VALUES ($1, $2)", 7, "item 7"); err != nil {
		t.Error(err)
	}
	if err := tx.Commit(); err != nil {
		t.Error(err)
	}
	select {
	case <-leave:
		t.Error("a mock is told to leave its node")
	default:
	}
	_ = conn.Raw(func(dc any) error {
		if pc, ok := crdbdrain.PgxConn(dc); ok {
			t.Errorf("%T holds %v", dc, pc)
		}
		return nil
	})
	conn.Close()
	db.Close()
	if err := mock.ExpectationsWereMet(); err != nil {
		t.Error(err)
	}
}
