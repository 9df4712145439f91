//! `tasuki._native`: what Python calls in Rust. Nothing is decided here.

mod cpu;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use tasuki_core::Identity;

/// Runs `tasuki router` with these arguments until it is told to end; returns
/// the exit code. Other Python threads run meanwhile.
#[pyfunction]
fn run_router(py: Python<'_>, args: Vec<String>) -> i32 {
    py.detach(|| tasuki_router::run(args))
}

/// Runs a command of `tasuki bench`, its name first among these arguments;
/// returns the exit code. Other Python threads run meanwhile.
#[pyfunction]
fn run_bench(py: Python<'_>, args: Vec<String>) -> i32 {
    py.detach(|| tasuki_bench::run(args))
}

/// Runs `tasuki simulate` with these arguments; returns the exit code.
#[pyfunction]
fn run_simulate(py: Python<'_>, args: Vec<String>) -> i32 {
    py.detach(|| tasuki_plan::run_simulate(args))
}

/// Runs `tasuki plan` with these arguments; returns the exit code.
#[pyfunction]
fn run_plan(py: Python<'_>, args: Vec<String>) -> i32 {
    py.detach(|| tasuki_plan::run_plan(args))
}

/// The plan for the arguments of `tasuki plan`: as JSON, and as it is printed.
#[pyfunction]
fn plan_quietly(py: Python<'_>, args: Vec<String>) -> PyResult<(String, String)> {
    py.detach(|| tasuki_plan::plan_quietly(args))
        .map_err(PyValueError::new_err)
}

/// Hashes of all full blocks of `tokens`, in order, 16 bytes each.
#[pyfunction]
fn block_hashes<'py>(
    py: Python<'py>,
    identity: [u8; 16],
    tenant: &str,
    block_size_tokens: usize,
    tokens: Vec<u32>,
) -> PyResult<Vec<Bound<'py, PyBytes>>> {
    if block_size_tokens == 0 {
        return Err(PyValueError::new_err(
            "block_size_tokens is 0; it must be at least 1",
        ));
    }
    let identity = Identity(identity);
    let hashes = tasuki_core::block_hashes(&identity, tenant, block_size_tokens, &tokens);
    Ok(hashes
        .iter()
        .map(|hash| PyBytes::new(py, &hash.0))
        .collect())
}

/// What steps that decode take on one worker, see `tasuki_core::StepFit`.
#[pyclass]
#[derive(Default)]
struct StepFit(tasuki_core::StepFit);

#[pymethods]
impl StepFit {
    #[new]
    fn new() -> Self {
        Self::default()
    }

    fn learn(&mut self, sequences: u32, kv_tokens: u64, prompt_tokens: u32, duration_s: f64) {
        self.0
            .learn(sequences, kv_tokens, prompt_tokens, duration_s);
    }

    fn decode_s(&self, sequences: u32, kv_tokens: u64) -> f64 {
        self.0.decode_s(sequences, kv_tokens)
    }

    fn prompt_token_s(&self) -> f64 {
        self.0.prompt_token_s()
    }
}

/// What a chunk of prompts adds to a step that decodes, see `tasuki_core::ChunkFit`.
#[pyclass]
#[derive(Default)]
struct ChunkFit(tasuki_core::ChunkFit);

#[pymethods]
impl ChunkFit {
    #[new]
    fn new() -> Self {
        Self::default()
    }

    fn learn(&mut self, prompt_tokens: u32, prompt_squares: f64, step_s: f64, decode_s: f64) {
        self.0
            .learn(prompt_tokens, prompt_squares, step_s, decode_s);
    }

    fn overhead_tokens(&self) -> f64 {
        self.0.overhead_tokens()
    }
}

#[pymodule]
fn _native(m: &Bound<'_, PyModule>) -> PyResult<()> {
    m.add("__version__", env!("CARGO_PKG_VERSION"))?;
    m.add("HAS_TLS", cfg!(feature = "tls"))?;
    m.add("HAS_OTEL", cfg!(feature = "otel"))?;
    m.add("STEP_SHARE", tasuki_plan::STEP_SHARE)?;
    m.add_function(wrap_pyfunction!(run_router, m)?)?;
    m.add_function(wrap_pyfunction!(run_bench, m)?)?;
    m.add_function(wrap_pyfunction!(run_simulate, m)?)?;
    m.add_function(wrap_pyfunction!(run_plan, m)?)?;
    m.add_function(wrap_pyfunction!(plan_quietly, m)?)?;
    m.add_function(wrap_pyfunction!(block_hashes, m)?)?;
    m.add_function(wrap_pyfunction!(cpu::greedy, m)?)?;
    m.add_function(wrap_pyfunction!(cpu::cpu_kernels, m)?)?;
    m.add_class::<StepFit>()?;
    m.add_class::<ChunkFit>()?;
    m.add_class::<cpu::CpuShape>()?;
    m.add_class::<cpu::CpuModel>()?;
    m.add_class::<cpu::CpuLinear>()?;
    Ok(())
}
