//! What commands print. `println!` panics where the reader has gone (`| head`) or the disk is
//! full, and the result of a run would be lost with it.

use std::io::{self, ErrorKind, Write};

/// Standard output takes no more.
#[derive(Debug, thiserror::Error)]
#[error("cannot print the report ({0}): redirect standard output to where there is room")]
pub struct PrintError(io::Error);

/// Prints to standard output. It is no failure that nobody reads on.
///
/// # Errors
/// It cannot be written for another reason.
pub fn print(text: &str) -> Result<(), PrintError> {
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => Err(PrintError(error)),
        _ => Ok(()),
    }
}

/// Prints a line to standard error, if it can be written.
pub fn warn(line: &str) {
    let _ = writeln!(io::stderr(), "{line}");
}
