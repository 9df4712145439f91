//! Reads files of one JSON value a line.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::Path;

use serde::de::DeserializeOwned;

use crate::error::PlanError;

/// Every line that is not blank, made of its JSON by `read`. `wanted`: what a line is, for the error
/// where it is something else.
///
/// # Errors
/// [`PlanError::File`]; [`PlanError::Line`] for what is no such JSON or what `read` refuses.
pub fn read_lines<Raw: DeserializeOwned, Item>(
    path: &Path,
    wanted: &str,
    mut read: impl FnMut(Raw) -> Result<Item, String>,
) -> Result<Vec<Item>, PlanError> {
    let unreadable = |source| PlanError::File {
        path: path.to_owned(),
        source,
    };
    let file = BufReader::new(File::open(path).map_err(unreadable)?);
    let mut items = Vec::new();
    for (number, line) in (1..).zip(file.lines()) {
        let line = line.map_err(unreadable)?;
        if line.trim().is_empty() {
            continue;
        }
        let raw = serde_json::from_str(&line).map_err(|error| {
            // It counts lines within this one.
            let said = error.to_string();
            let place = format!(" at line {} column {}", error.line(), error.column());
            let reason = said.strip_suffix(&place).unwrap_or(&said);
            format!("{reason} at column {}; {wanted}", error.column())
        });
        items.push(raw.and_then(&mut read).map_err(|reason| PlanError::Line {
            path: path.to_owned(),
            line: number,
            reason,
        })?);
    }
    Ok(items)
}
