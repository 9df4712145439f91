//! `tasuki bench` without Python: `cargo run --release -p tasuki-bench --example bench -- serve --help`.

fn main() {
    std::process::exit(tasuki_bench::run(std::env::args().skip(1).collect()));
}
