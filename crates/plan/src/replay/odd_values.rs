//! A log with a value that no router writes is replayed or refused: it never ends the program.

use std::fs;
use std::path::Path;

use serde_json::{Value, json};

use super::tests::{parse, requests, served, write_log};
use super::*;

/// The places of all numbers in a JSON value, as pointers.
fn numbers(value: &Value, at: &str, found: &mut Vec<String>) {
    match value {
        Value::Number(_) => found.push(at.to_owned()),
        Value::Array(items) => {
            for (index, item) in items.iter().enumerate() {
                numbers(item, &format!("{at}/{index}"), found);
            }
        }
        Value::Object(fields) => {
            for (name, field) in fields {
                numbers(field, &format!("{at}/{name}"), found);
            }
        }
        _ => {}
    }
}

fn replay_all(path: &Path) -> Result<usize, SimulateError> {
    let log = Logged::read(path)?;
    let (args, _) = parse(&[path.to_str().unwrap()]);
    let hardware = Hardware::or(&args.hardware, log.source())?;
    let run = run(&log, &hardware, &real(&args, &log, &hardware), 1.0);
    figures(&run.outcomes, None);
    Ok(run.outcomes.len())
}

#[test]
fn no_value_of_a_log_ends_the_program() {
    let folder = tempfile::tempdir().unwrap();
    let requests = &requests()[..2];
    let path = write_log(folder.path(), requests, &served(requests));
    let lines: Vec<Value> = fs::read_to_string(&path)
        .unwrap()
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    assert_eq!(replay_all(&path).unwrap(), 2);
    let (mut replayed, mut refused) = (0, 0);
    for (index, line) in lines.iter().enumerate().skip(1) {
        let mut places = Vec::new();
        numbers(line, "", &mut places);
        for place in places {
            for odd in [json!(0), json!(u32::MAX), json!(1e300)] {
                eprintln!("line {index}, {place} = {odd}");
                let mut lines = lines.clone();
                *lines[index].pointer_mut(&place).unwrap() = odd;
                let text: Vec<String> = lines.iter().map(Value::to_string).collect();
                fs::write(&path, text.join("\n")).unwrap();
                match replay_all(&path) {
                    Ok(_) => replayed += 1,
                    Err(_) => refused += 1,
                }
            }
        }
    }
    assert!(replayed > 0 && refused > 0, "{replayed}, {refused}");
}
