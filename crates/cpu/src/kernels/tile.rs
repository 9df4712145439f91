//! Tiles: a few rows times a few vectors of outputs, the sums in registers.
//!
//! Every sum is one chain over the inputs in their order, whatever the height and width of
//! the tile: a token's logits do not depend on the batch around it.
//!
//! A tile has as many sums as registers hold, so that multiplications wait neither for one
//! another nor for loads. What a tile's rows are multiplied with is a
//! `Source`: a packed weight (panels.rs, int8.rs), packed keys or values, or values where
//! they are in the pool (values.rs).

use crate::simd::{Floats, Simd, Vector};

/// Rows of activations in memory, `stride` numbers from one to the next.
#[derive(Debug, Clone, Copy)]
pub struct Rows<N> {
    pub data: *const N,
    pub stride: usize,
}

impl<N> Rows<N> {
    /// The rows from `row` on, from their number `column` on.
    pub fn at(self, row: usize, column: usize) -> Self {
        Self {
            data: self.data.wrapping_add(row * self.stride + column),
            ..self
        }
    }

    /// The same numbers as another type.
    pub fn cast<T>(self) -> Rows<T> {
        Rows {
            data: self.data.cast(),
            stride: self.stride,
        }
    }
}

/// Where a tile's sums go, `stride` numbers from a row to the next.
#[derive(Debug, Clone, Copy)]
pub struct Sums {
    pub data: *mut f32,
    pub stride: usize,
}

impl Sums {
    /// As `Rows::at`.
    pub fn at(self, row: usize, column: usize) -> Self {
        Self {
            data: self.data.wrapping_add(row * self.stride + column),
            ..self
        }
    }
}

/// What rows are multiplied with: units of a few inputs, `COLUMNS` outputs beside each other.
///
/// # Safety
/// Of all methods: as for `Simd`; units and columns exist.
pub trait Source<S: Simd>: Sized {
    const COLUMNS: usize;
    /// Inputs of a term.
    const INPUTS: usize;
    type Term: Copy;
    type Unit<const V: usize>;

    /// The same from a column on.
    fn skip_columns(&self, column: usize) -> Self;
    /// How many terms a unit has.
    fn terms(&self, unit: usize) -> usize;
    /// Begin a unit.
    unsafe fn unit<const V: usize>(&mut self, unit: usize) -> Self::Unit<V>;
    /// A term of each of `V` vectors.
    unsafe fn term<const V: usize>(unit: &Self::Unit<V>, index: usize) -> [Self::Term; V];
    /// `INPUTS` numbers of a row, for all lanes.
    unsafe fn factor(row: *const S::Number) -> Self::Term;
    /// `sum + factor * term`.
    unsafe fn multiply_add(factor: Self::Term, term: Self::Term, sum: Vector<S>) -> Vector<S>;
}

/// Rows in as many tiles of at most `most` as needed, of nearly the same height: first
/// row and height.
pub fn tiles(rows: usize, most: usize) -> impl Iterator<Item = (usize, usize)> {
    let count = rows.div_ceil(most);
    (0..count).map(move |i| {
        let (begin, end) = (i * rows / count, (i + 1) * rows / count);
        (begin, end - begin)
    })
}

/// Multiply up to 8 rows with all columns of a source.
///
/// # Safety
/// The rows hold as many numbers as the units have inputs; there is space for the sums,
/// which are the beginning of the new ones if `go_on`.
pub unsafe fn multiply<S: Simd, P: Source<S>>(
    a: Rows<S::Number>,
    rows: usize,
    source: &P,
    units: usize,
    sums: Sums,
    go_on: bool,
) {
    // SAFETY: the caller's promise, passed on.
    unsafe {
        match rows {
            1 => slices::<S, P, 1>(a, source, units, sums, go_on),
            2 => slices::<S, P, 2>(a, source, units, sums, go_on),
            3 => slices::<S, P, 3>(a, source, units, sums, go_on),
            4 => slices::<S, P, 4>(a, source, units, sums, go_on),
            5 => slices::<S, P, 5>(a, source, units, sums, go_on),
            6 => slices::<S, P, 6>(a, source, units, sums, go_on),
            7 => slices::<S, P, 7>(a, source, units, sums, go_on),
            _ => slices::<S, P, 8>(a, source, units, sums, go_on),
        }
    }
}

/// Vectors of a tile of `rows` rows: the most that divide `vectors` and fit the registers,
/// beside a vector of weights for each, a number of a row and a constant.
pub const fn width(rows: usize, vectors: usize, registers: usize) -> usize {
    let mut width = vectors;
    while width > 1 && (!vectors.is_multiple_of(width) || (rows + 1) * width + 2 > registers) {
        width -= 1;
    }
    width
}

/// # Safety
/// As `multiply`.
unsafe fn slices<S: Simd, P: Source<S>, const M: usize>(
    a: Rows<S::Number>,
    source: &P,
    units: usize,
    sums: Sums,
    go_on: bool,
) {
    let vectors = const { P::COLUMNS / S::Floats::LANES };
    let width = const { width(M, P::COLUMNS / S::Floats::LANES, S::Floats::REGISTERS) };
    for vector in (0..vectors).step_by(width) {
        let column = vector * S::Floats::LANES;
        let (source, sums) = (source.skip_columns(column), sums.at(0, column));
        // SAFETY: the caller's promise, passed on.
        unsafe {
            match width {
                1 => tile::<S, P, M, 1>(a, source, units, sums, go_on),
                2 => tile::<S, P, M, 2>(a, source, units, sums, go_on),
                3 => tile::<S, P, M, 3>(a, source, units, sums, go_on),
                4 => tile::<S, P, M, 4>(a, source, units, sums, go_on),
                6 => tile::<S, P, M, 6>(a, source, units, sums, go_on),
                8 => tile::<S, P, M, 8>(a, source, units, sums, go_on),
                12 => tile::<S, P, M, 12>(a, source, units, sums, go_on),
                16 => tile::<S, P, M, 16>(a, source, units, sums, go_on),
                _ => unreachable!("{width} does not divide 48 or 64 columns"),
            }
        }
    }
}

/// # Safety
/// As `multiply`.
unsafe fn tile<S: Simd, P: Source<S>, const M: usize, const V: usize>(
    a: Rows<S::Number>,
    mut source: P,
    units: usize,
    sums: Sums,
    go_on: bool,
) {
    // SAFETY: the caller's promise.
    let run = move || unsafe {
        let lanes = S::Floats::LANES;
        let mut acc = [[S::Floats::splat(0.0); V]; M];
        if go_on {
            for (m, row) in acc.iter_mut().enumerate() {
                for (v, x) in row.iter_mut().enumerate() {
                    *x = S::Floats::load(sums.data.add(m * sums.stride + v * lanes), lanes);
                }
            }
        }
        let mut from = a.data;
        for index in 0..units {
            let unit = source.unit::<V>(index);
            for term in 0..source.terms(index) {
                let w: [P::Term; V] = P::term(&unit, term);
                for (m, row) in acc.iter_mut().enumerate() {
                    let factor = P::factor(from.add(m * a.stride));
                    for (x, &w) in row.iter_mut().zip(&w) {
                        *x = P::multiply_add(factor, w, *x);
                    }
                }
                from = from.add(P::INPUTS);
            }
        }
        for (m, row) in acc.iter().enumerate() {
            for (v, &x) in row.iter().enumerate() {
                S::Floats::store(sums.data.add(m * sums.stride + v * lanes), lanes, x);
            }
        }
    };
    // SAFETY: as above.
    unsafe { S::vectorize(run) };
}
