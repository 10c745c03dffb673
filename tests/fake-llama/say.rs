//! The only code that writes to standard output and standard error; ignores a closed pipe.

use std::io::Write as _;

pub(crate) fn err(line: &str) {
    let _ignored = writeln!(std::io::stderr(), "{line}");
}

pub(crate) fn out(line: &str) {
    let _ignored = writeln!(std::io::stdout(), "{line}");
}
