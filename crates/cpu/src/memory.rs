//! Arrays as the kernels want them: zeroed, on cache lines, large ones on huge pages.

use std::alloc::{Layout, alloc, dealloc, handle_alloc_error};
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

const LINE_BYTES: usize = 64;
const HUGE_BYTES: usize = 2 << 20;

/// Numbers whose bytes may all be zero.
pub trait Element: Copy + Send + Sync + 'static {}
impl Element for u16 {}
impl Element for f32 {}

/// A zeroed array of fixed length. A weight is read from end to end at every step:
/// huge pages spare it half a million translations.
pub struct Buffer<T: Element> {
    data: NonNull<T>,
    len: usize,
    layout: Layout,
}

// SAFETY: it owns its memory, and `T` is plain data.
unsafe impl<T: Element> Send for Buffer<T> {}
// SAFETY: as above; shared access only reads.
unsafe impl<T: Element> Sync for Buffer<T> {}

impl<T: Element> Buffer<T> {
    /// An array of `len` zeros.
    pub fn zeroed(len: usize) -> Self {
        let bytes = (len * size_of::<T>()).max(LINE_BYTES);
        let unit = if bytes >= HUGE_BYTES {
            HUGE_BYTES
        } else {
            LINE_BYTES
        };
        let layout = Layout::from_size_align(bytes.next_multiple_of(unit), unit)
            .expect("an array of a sane size");
        // SAFETY: the layout's size is not 0.
        let raw = unsafe { alloc(layout) };
        let Some(data) = NonNull::new(raw.cast::<T>()) else {
            handle_alloc_error(layout)
        };
        if unit == HUGE_BYTES {
            advise_huge(raw, layout.size());
        }
        // SAFETY: `raw` was just allocated with this size; zero bytes are an `Element`.
        unsafe { raw.write_bytes(0, layout.size()) };
        Self { data, len, layout }
    }

    /// Where it begins, for kernels that write from several threads.
    pub fn as_mut_ptr(&mut self) -> *mut T {
        self.data.as_ptr()
    }
}

impl<T: Element> Deref for Buffer<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: `len` initialised elements live as long as `self`.
        unsafe { std::slice::from_raw_parts(self.data.as_ptr(), self.len) }
    }
}

impl<T: Element> DerefMut for Buffer<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as in `deref`, and `self` is borrowed alone.
        unsafe { std::slice::from_raw_parts_mut(self.data.as_ptr(), self.len) }
    }
}

impl<T: Element> Drop for Buffer<T> {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout, freed once.
        unsafe { dealloc(self.data.as_ptr().cast(), self.layout) };
    }
}

#[cfg(target_os = "linux")]
fn advise_huge(data: *mut u8, bytes: usize) {
    use rustix::mm::{Advice, madvise};
    // SAFETY: the range is ours, and the advice changes no content. Without huge pages
    // it is only slower: a refusal does not matter.
    let _ = unsafe { madvise(data.cast(), bytes, Advice::LinuxHugepage) };
}

#[cfg(not(target_os = "linux"))]
fn advise_huge(_: *mut u8, _: usize) {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arrays_are_zero_and_begin_on_a_line() {
        for len in [0, 1, 1000, HUGE_BYTES] {
            let mut buffer = Buffer::<f32>::zeroed(len);
            assert_eq!(buffer.len(), len);
            assert!(buffer.iter().all(|&x| x == 0.0));
            assert_eq!(buffer.as_mut_ptr() as usize % LINE_BYTES, 0);
            buffer.fill(1.0);
            assert_eq!(buffer.iter().sum::<f32>(), len as f32);
        }
    }
}
