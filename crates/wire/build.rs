//! Compiles `proto/` with a pure-Rust compiler, so that no `protoc` is needed.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let root = "../../proto";
    println!("cargo:rerun-if-changed={root}");
    let files = ["tasuki/v1/worker.proto"];
    let descriptors = protox::compile(files, [root])?;
    tonic_prost_build::configure().compile_fds(descriptors)?;
    Ok(())
}
