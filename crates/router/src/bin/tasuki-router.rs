//! `tasuki router` without Python: the same options, the same exit codes.

fn main() {
    std::process::exit(tasuki_router::run(std::env::args_os().skip(1)));
}
