//! `tasuki._native.CpuModel`: tensors come as buffers, are checked, and are passed on.

use pyo3::buffer::{Element, PyBuffer};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use tasuki_cpu::{Batch, Format, Instance, LayerWeights, Linear, Model, Pool, Shape};

/// The shape of a Llama-family model; `windows` has an entry for each layer.
#[pyclass(frozen)]
pub struct CpuShape(Shape);

#[pymethods]
impl CpuShape {
    #[new]
    #[pyo3(signature = (*, heads, kv_heads, head_dim, hidden, intermediate, vocab, norm_eps, windows))]
    #[allow(clippy::too_many_arguments)] // a shape's numbers, by keyword only
    fn new(
        heads: usize,
        kv_heads: usize,
        head_dim: usize,
        hidden: usize,
        intermediate: usize,
        vocab: usize,
        norm_eps: f32,
        windows: Vec<Option<usize>>,
    ) -> Self {
        Self(Shape {
            heads,
            kv_heads,
            head_dim,
            hidden,
            intermediate,
            vocab,
            norm_eps,
            windows,
        })
    }

    /// Why the kernels cannot run a model of this shape; None: they can.
    fn why_not(&self) -> Option<String> {
        self.0.why_not()
    }
}

/// Name and missing instructions of each set of CPU kernels, the quickest last.
#[pyfunction]
pub fn cpu_kernels() -> Vec<(&'static str, Vec<&'static str>)> {
    let all = Instance::all().into_iter();
    all.map(|instance| (instance.name(), instance.missing()))
        .collect()
}

/// A model with packed weights; bfloat16 arrays come as int16.
#[pyclass]
pub struct CpuModel(Model);

#[pymethods]
impl CpuModel {
    #[new]
    fn new(
        py: Python<'_>,
        kernels: &str,
        int8: bool,
        shape: &CpuShape,
        embedding: PyBuffer<i16>,
        norm: PyBuffer<i16>,
        head: PyBuffer<i16>,
    ) -> PyResult<Self> {
        let weights = (bits(&embedding)?, bits(&norm)?, bits(&head)?);
        let instance = Instance::named(kernels).map_err(refused)?;
        let (format, shape) = (format(int8), shape.0.clone());
        let (embedding, norm, head) = weights;
        let model = py.detach(|| Model::new(instance, format, shape, embedding, norm, head));
        model.map(Self).map_err(refused)
    }

    /// Add the next layer.
    #[pyo3(signature = (*, attention_norm, qkv, qkv_bias, head_norms, output, output_bias, mlp_norm, gate, up, down))]
    #[allow(clippy::too_many_arguments)] // a layer's weights, by keyword only
    fn push_layer(
        &mut self,
        py: Python<'_>,
        attention_norm: PyBuffer<i16>,
        qkv: PyBuffer<i16>,
        qkv_bias: Option<PyBuffer<i16>>,
        head_norms: Option<(PyBuffer<i16>, PyBuffer<i16>)>,
        output: PyBuffer<i16>,
        output_bias: Option<PyBuffer<i16>>,
        mlp_norm: PyBuffer<i16>,
        gate: PyBuffer<i16>,
        up: PyBuffer<i16>,
        down: PyBuffer<i16>,
    ) -> PyResult<()> {
        let head_norms = match &head_norms {
            Some((query, key)) => Some((bits(query)?, bits(key)?)),
            None => None,
        };
        let weights = LayerWeights {
            attention_norm: bits(&attention_norm)?,
            qkv: bits(&qkv)?,
            qkv_bias: qkv_bias.as_ref().map(bits).transpose()?,
            head_norms,
            output: bits(&output)?,
            output_bias: output_bias.as_ref().map(bits).transpose()?,
            mlp_norm: bits(&mlp_norm)?,
            gate: bits(&gate)?,
            up: bits(&up)?,
            down: bits(&down)?,
        };
        py.detach(|| self.0.push_layer(&weights)).map_err(refused)
    }

    /// Run one step; other Python threads run meanwhile.
    #[pyo3(signature = (*, pool, block_size, tokens, positions, slots, tables, query_lens, context_lens, logits_rows, rotations, threads, logits))]
    #[allow(clippy::too_many_arguments)] // a batch's arrays, by keyword only
    fn forward(
        &mut self,
        py: Python<'_>,
        pool: PyBuffer<i16>,
        block_size: usize,
        tokens: PyBuffer<i64>,
        positions: PyBuffer<i64>,
        slots: PyBuffer<i64>,
        tables: PyBuffer<i32>,
        query_lens: Vec<usize>,
        context_lens: Vec<usize>,
        logits_rows: PyBuffer<i64>,
        rotations: PyBuffer<f32>,
        threads: usize,
        logits: PyBuffer<f32>,
    ) -> PyResult<()> {
        let batch = Batch {
            tokens: contents(&tokens)?,
            positions: contents(&positions)?,
            slots: contents(&slots)?,
            tables: contents(&tables)?,
            query_lens: &query_lens,
            context_lens: &context_lens,
            logits_rows: contents(&logits_rows)?,
        };
        let len = bits(&pool)?.len();
        let pool = Pool {
            data: writable(&pool)?.cast(),
            len,
            block_size,
        };
        let rotations = contents(&rotations)?;
        let count = contents(&logits)?.len();
        let data = writable(&logits)?;
        // SAFETY: `count` numbers that the caller lends us to write to.
        let logits = unsafe { std::slice::from_raw_parts_mut(data, count) };
        // SAFETY: the pool's buffer is held until the end; its blocks are the engine's, and
        // only its thread calls this.
        py.detach(|| unsafe { self.0.forward(pool, batch, rotations, threads, logits) })
            .map_err(refused)
    }
}

/// One GEMM with a packed weight, on the calling thread.
#[pyclass]
pub struct CpuLinear(Linear);

#[pymethods]
impl CpuLinear {
    #[new]
    fn new(kernels: &str, int8: bool, weight: PyBuffer<i16>, inputs: usize) -> PyResult<Self> {
        let instance = Instance::named(kernels).map_err(refused)?;
        Linear::new(instance, format(int8), bits(&weight)?, inputs)
            .map(Self)
            .map_err(refused)
    }

    /// Multiply the rows of `x` into `out`.
    fn run(&self, x: PyBuffer<i16>, out: PyBuffer<f32>) -> PyResult<()> {
        let len = contents(&out)?.len();
        // SAFETY: as many numbers as the buffer has, lent to us to write to.
        let sums = unsafe { std::slice::from_raw_parts_mut(writable(&out)?, len) };
        self.0.run(bits(&x)?, sums).map_err(refused)
    }
}

/// The likeliest token of each row of `width` logits into `tokens`; `none` where there is none.
#[pyfunction]
pub fn greedy(
    logits: PyBuffer<f32>,
    width: usize,
    tokens: PyBuffer<i64>,
    none: i64,
) -> PyResult<()> {
    let rows = contents(&logits)?;
    if width * tokens.item_count() != rows.len() || width == 0 {
        return Err(PyValueError::new_err(format!(
            "{} logits are not {} rows of {width}",
            rows.len(),
            tokens.item_count()
        )));
    }
    contents(&tokens)?; // one after another
    // SAFETY: as many numbers as the buffer has, lent to us to write to.
    let tokens = unsafe { std::slice::from_raw_parts_mut(writable(&tokens)?, rows.len() / width) };
    for (row, token) in rows.chunks_exact(width).zip(tokens) {
        *token = tasuki_cpu::greedy(row).map_or(none, |index| index as i64);
    }
    Ok(())
}

fn format(int8: bool) -> Format {
    if int8 { Format::Int8 } else { Format::Bfloat16 }
}

fn refused(error: tasuki_cpu::CpuError) -> PyErr {
    PyValueError::new_err(error.to_string())
}

/// The numbers of a contiguous buffer.
fn contents<T: Element>(buffer: &PyBuffer<T>) -> PyResult<&[T]> {
    if !buffer.is_c_contiguous() {
        return Err(PyValueError::new_err("an array is not contiguous"));
    }
    if buffer.item_count() == 0 {
        return Ok(&[]);
    }
    // SAFETY: contiguous, of this type, and held by the buffer; the engine writes to none
    // of its arrays while a step runs.
    Ok(unsafe { std::slice::from_raw_parts(buffer.buf_ptr().cast(), buffer.item_count()) })
}

/// The bits of bfloat16 numbers.
fn bits(buffer: &PyBuffer<i16>) -> PyResult<&[u16]> {
    let numbers = contents(buffer)?;
    // SAFETY: the same memory, of the same size and alignment; any bits are a u16.
    Ok(unsafe { std::slice::from_raw_parts(numbers.as_ptr().cast(), numbers.len()) })
}

fn writable<T: Element>(buffer: &PyBuffer<T>) -> PyResult<*mut T> {
    if buffer.readonly() {
        return Err(PyValueError::new_err("an array to write to is read-only"));
    }
    Ok(buffer.buf_ptr().cast())
}
