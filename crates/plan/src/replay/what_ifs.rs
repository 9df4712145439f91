//! What-ifs are told as they are, and change what they say.

use std::path::{Path, PathBuf};

use super::tests::{parse, requests, served, write_log};
use super::*;

/// A log of two workers.
fn log(folder: &Path) -> PathBuf {
    let requests = requests();
    write_log(folder, &requests, &served(&requests))
}

fn said(path: &Path, words: &[&str]) -> String {
    let (args, matches) = parse(&[&[path.to_str().unwrap()], words].concat());
    replay(&args, &matches, path).unwrap().1
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
