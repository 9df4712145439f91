//! Limits of workers that are given hold in the replay as in the what-if.

use std::path::Path;

use super::tests::{parse, requests, served, write_log};
use super::*;

/// Blocks, block size and longest request of the first worker of the replay, and of the what-if.
fn limits(path: &Path, words: &[&str]) -> [(u32, u32, u32); 2] {
    let other = ["--prefill", "1", "--decode", "1"];
    let (args, matches) = parse(&[&[path.to_str().unwrap()], words, &other].concat());
    let log = Logged::read(path).unwrap();
    let hardware = Hardware::or(&args.hardware, log.source()).unwrap();
    let then = what_if(&args, &matches, &log, &hardware).unwrap().unwrap();
    [real(&args, &log, &hardware), then].map(|deployment| {
        let limits = deployment.workers[0].limits;
        (limits.num_blocks, limits.block_size, limits.max_model_len)
    })
}

#[test]
fn limits_that_are_given_hold_in_both_runs() {
    let folder = tempfile::tempdir().unwrap();
    let requests = &requests()[..4];
    let path = write_log(folder.path(), requests, &served(requests));
    for (words, limits_then) in [
        (&[][..], (8_000, 32, 16_384)),
        (&["--num-blocks", "2000"], (2_000, 32, 16_384)),
        (&["--max-model-len", "8192"], (8_000, 32, 8_192)),
        (&["--block-size", "16"], (16_000, 16, 16_384)),
    ] {
        assert_eq!(limits(&path, words), [limits_then; 2], "{words:?}");
    }
}
