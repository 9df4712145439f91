//! Arrays as the kernels want them: zeroed, on cache lines, large ones on huge pages.

use std::alloc::{Layout, alloc, dealloc, handle_alloc_error};
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::Arc;

const LINE_BYTES: usize = 64;
const HUGE_BYTES: usize = 2 << 20;

/// Numbers whose bytes may all be zero.
pub trait Element: Copy + Default + Send + Sync + 'static {}
impl Element for u16 {}
impl Element for f32 {}

/// Memory that arrays are taken from, one beside the other.
///
/// A weight is read from end to end at every step: huge pages spare it half a million
/// translations. Alone, an array smaller than such a page would get none.
pub struct Arena {
    chunk_bytes: usize,
    region: Option<Arc<Region>>,
    used_bytes: usize,
}

impl Arena {
    /// Empty yet; grows by so much, or by what an array takes if that is more.
    pub fn new(chunk_bytes: usize) -> Self {
        Self {
            chunk_bytes,
            region: None,
            used_bytes: 0,
        }
    }

    /// An array of `len` zeros.
    pub fn take<T: Element>(&mut self, len: usize) -> Buffer<T> {
        let bytes = (len * size_of::<T>()).next_multiple_of(LINE_BYTES);
        let fits = |region: &Arc<Region>| region.layout.size() - self.used_bytes >= bytes;
        let region = match self.region.take().filter(fits) {
            Some(region) => region,
            None => {
                self.used_bytes = 0;
                Arc::new(Region::new(bytes.max(self.chunk_bytes)))
            }
        };
        // SAFETY: so many bytes from there on are the region's, and nobody else's;
        // zero bytes are an `Element`.
        let data = unsafe {
            let data = region.data.add(self.used_bytes);
            data.write_bytes(0, bytes);
            data.cast()
        };
        self.used_bytes += bytes;
        self.region = Some(Arc::clone(&region));
        Buffer {
            data,
            len,
            _region: region,
        }
    }
}

/// Memory on cache lines; on huge pages where it holds one.
struct Region {
    data: NonNull<u8>,
    layout: Layout,
}

// SAFETY: it is only a place; who uses which part of it is the arrays' business.
unsafe impl Send for Region {}
// SAFETY: as above.
unsafe impl Sync for Region {}

impl Region {
    fn new(bytes: usize) -> Self {
        let unit = if bytes >= HUGE_BYTES {
            HUGE_BYTES
        } else {
            LINE_BYTES
        };
        let bytes = bytes.max(1).next_multiple_of(unit);
        let layout = Layout::from_size_align(bytes, unit).expect("an array of a sane size");
        // SAFETY: the layout's size is not 0.
        let Some(data) = NonNull::new(unsafe { alloc(layout) }) else {
            handle_alloc_error(layout)
        };
        if unit == HUGE_BYTES {
            advise_huge(data.as_ptr(), bytes);
        }
        Self { data, layout }
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout, freed once.
        unsafe { dealloc(self.data.as_ptr(), self.layout) };
    }
}

/// A zeroed array of fixed length.
pub struct Buffer<T: Element> {
    data: NonNull<T>,
    len: usize,
    _region: Arc<Region>,
}

// SAFETY: its part of the region is its own, and `T` is plain data.
unsafe impl<T: Element> Send for Buffer<T> {}
// SAFETY: as above; shared access only reads.
unsafe impl<T: Element> Sync for Buffer<T> {}

impl<T: Element> Buffer<T> {
    /// An array of `len` zeros, alone.
    pub fn zeroed(len: usize) -> Self {
        Arena::new(0).take(len)
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
    #[test]
    fn arrays_beside_one_another_do_not_touch() {
        let mut arena = Arena::new(4096);
        let mut arrays: Vec<Buffer<u16>> = [100, 1, 0, 1500, 3000, 40]
            .into_iter()
            .map(|len| arena.take(len))
            .collect();
        drop(arena);
        for (i, array) in arrays.iter_mut().enumerate() {
            assert_eq!(array.as_mut_ptr() as usize % LINE_BYTES, 0);
            assert!(array.iter().all(|&x| x == 0), "array {i}");
            array.fill(i as u16 + 1);
        }
        for (i, array) in arrays.iter().enumerate() {
            assert!(array.iter().all(|&x| x == i as u16 + 1), "array {i}");
        }
        let beside = arrays[1].as_mut_ptr() as usize - arrays[0].as_mut_ptr() as usize;
        assert_eq!(beside, 256);
    }
}
