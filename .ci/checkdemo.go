// Checkdemo reads the output of "crdbdrain demo -json" and fails unless it is what the README promises.
package main

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
)

type report struct {
	Drivers []struct {
		Driver       string
		Ops          int64
		Errors       *int64
		ErrorsByCode map[string]int64 `json:"errors_by_code"`
		Lost, Culled int64
		DrainSeconds []float64 `json:"drain_seconds"`
	}
}

func main() {
	if err := check(os.Stdin); err != nil {
		fmt.Fprintln(os.Stderr, "demo -json:", err)
		os.Exit(1)
	}
}

func check(r io.Reader) error {
	decoder := json.NewDecoder(r)
	var got report
	if err := decoder.Decode(&got); err != nil {
		return err
	}
	if err := decoder.Decode(new(any)); err != io.EOF {
		return fmt.Errorf("more than one JSON value (%v)", err)
	}
	seen := map[string]bool{}
	for _, d := range got.Drivers {
		seen[d.Driver] = true
		if d.Errors == nil || d.Ops == 0 || len(d.DrainSeconds) == 0 {
			return fmt.Errorf("driver %q: ops, errors or drain_seconds is missing", d.Driver)
		}
		fmt.Printf("    %s: %d operations, %d errors %v, %d lost, %d culled, drains %.2f s\n",
			d.Driver, d.Ops, *d.Errors, d.ErrorsByCode, d.Lost, d.Culled, d.DrainSeconds)
		if d.Driver == "crdbdrain" && *d.Errors != 0 {
			return fmt.Errorf("crdbdrain saw %d errors, want 0", *d.Errors)
		}
	}
	if !seen["pgx"] || !seen["crdbdrain"] {
		return fmt.Errorf("drivers %v, want pgx and crdbdrain", seen)
	}
	return nil
}
