//! What-ifs are told as they are, and change what they say.

use std::path::{Path, PathBuf};

use serde_json::Value;

use super::tests::{parse, requests, served, write_log};
use super::*;

/// A log of two workers.
fn log(folder: &Path) -> PathBuf {
    let requests = requests();
    write_log(folder, &requests, &served(&requests))
}

/// The same where the decode worker is not ready before so many seconds of the log.
fn log_of_a_late_worker(folder: &Path, ready_s: f64) -> PathBuf {
    let path = log(folder);
    let text = std::fs::read_to_string(&path).unwrap();
    let mut lines: Vec<String> = text.lines().map(str::to_owned).collect();
    let mut late: Value = serde_json::from_str(&lines[1]).unwrap();
    late["fleet"]["t"] = json!(ready_s);
    lines.push(late.to_string());
    late["fleet"]["t"] = json!(0.0);
    late["fleet"]["workers"][1]["ready"] = json!(false);
    lines[1] = late.to_string();
    std::fs::write(&path, lines.join("\n")).unwrap();
    path
}

fn then(path: &Path, words: &[&str]) -> Option<Deployment> {
    let (args, matches) = parse(&[&[path.to_str().unwrap()], words].concat());
    let log = Logged::read(path).unwrap();
    let hardware = Hardware::or(&args.hardware, log.source()).unwrap();
    what_if(&args, &matches, &log, &hardware).unwrap()
}

fn said(path: &Path, words: &[&str]) -> String {
    let (args, matches) = parse(&[&[path.to_str().unwrap()], words].concat());
    replay(&args, &matches, path).unwrap().1
}

#[test]
fn workers_come_and_go_as_fast_as_requests_do() {
    let folder = tempfile::tempdir().unwrap();
    // The first request came after 3 s of the log.
    let path = log_of_a_late_worker(folder.path(), 9.0);
    let then = then(&path, &["--speed", "2", "--fault", "slow:0@4=2"]).unwrap();
    let at: Vec<f64> = then.faults.iter().map(|fault| fault.at.as_s()).collect();
    assert_eq!(at, [0.0, 3.0, 4.0], "{:?}", then.faults);
}

#[test]
fn requests_that_fail_have_a_row() {
    let folder = tempfile::tempdir().unwrap();
    let path = log(folder.path());
    let text = said(&path, &["--fault", "drain:0@6"]);
    let row = text.lines().find(|line| line.starts_with("failed"));
    let row: Vec<&str> = row.expect(&text).split_whitespace().collect();
    // Of 240 requests in 12 s.
    assert_eq!(row[2..4], ["0.00", "0.00"], "{text}");
    let failed: f64 = row[6].parse().expect(&text);
    assert!((45.0..55.0).contains(&failed), "{text}");
}

#[test]
fn workers_on_other_machines_are_a_what_if() {
    let folder = tempfile::tempdir().unwrap();
    let path = log(folder.path());
    let then = then(&path, &["--workers-per-host", "1"]).expect("a second run");
    assert_ne!(then.workers[0].host, then.workers[1].host);
    let text = said(&path, &["--workers-per-host", "1"]);
    assert!(text.contains("1 workers on a machine"), "{text}");
}

#[test]
fn faults_of_another_topology_are_told() {
    let folder = tempfile::tempdir().unwrap();
    let path = log_of_a_late_worker(folder.path(), 4.0);
    let text = said(&path, &["--mixed", "2", "--fault", "slow:0@1=2"]);
    assert!(
        text.contains("what if: 2 mixed, strict roles, with faults"),
        "{text}"
    );
}
