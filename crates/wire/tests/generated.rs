//! `generated/` is what `proto/` says. With `TASUKI_WRITE_GENERATED` set, it is written.
//!
//! The compiler of `proto/` takes longer to build than the messages, so it is no part of a
//! user's build.

use std::path::Path;

#[test]
fn the_committed_messages_are_those_of_the_contract() {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let fresh = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let descriptors = protox::compile(["tasuki/v1/worker.proto"], [here.join("../../proto")])
        .expect("a contract that compiles");
    tonic_prost_build::configure()
        .out_dir(fresh)
        .compile_fds(descriptors)
        .expect("code for the contract");
    let name = "tasuki.v1.rs";
    let made = std::fs::read_to_string(fresh.join(name)).expect("the code");
    let committed = here.join("generated").join(name);
    if std::env::var_os("TASUKI_WRITE_GENERATED").is_some() {
        std::fs::write(&committed, made).expect("a folder to write to");
        return;
    }
    let known = std::fs::read_to_string(&committed).unwrap_or_default();
    // No assert_eq: its message would be both files.
    assert!(
        made == known,
        "{} is out of date: run make proto",
        committed.display()
    );
}
