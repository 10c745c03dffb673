//! Writes GGUF version 3 files: typed metadata and f32 tensors, alignment 32.
//!
//! It exists for the sample model, so it knows no quantized types and never reads a file. The layout is that of
//! the GGUF specification (ggml, `docs/gguf.md`), all integers little-endian:
//!
//! ```text
//!  "GGUF" | version u32 | tensors u64 | entries u64
//!  entry*       name, type u32, value
//!  tensor info* name, dimensions u32, lengths u64*, type u32, offset u64 (from the start of the data)
//!  zeroes up to a multiple of 32
//!  tensor data*, each zero-padded to a multiple of 32
//! ```

use std::io::{self, Write};

/// Every offset in the data section is a multiple of this many bytes; 32 is what a reader assumes by default.
pub const ALIGNMENT: usize = 32;
/// The format version that this module writes.
pub const VERSION: u32 = 3;
/// ggml's number for the tensor type f32.
const GGML_TYPE_F32: u32 = 0;

/// One metadata value. Arrays hold one type each, as the format wants.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// A 32-bit unsigned integer; most sizes and token ids.
    U32(u32),
    /// A 32-bit float.
    F32(f32),
    /// A truth value, one byte.
    Bool(bool),
    /// UTF-8 text.
    String(String),
    /// Texts, such as a vocabulary.
    Strings(Vec<String>),
    /// 32-bit signed integers, such as token types.
    I32s(Vec<i32>),
    /// 32-bit floats, such as the mean of each colour.
    F32s(Vec<f32>),
}

impl Value {
    /// The format's number for this type of value.
    const fn kind(&self) -> u32 {
        match self {
            Self::U32(_) => 4,
            Self::F32(_) => 6,
            Self::Bool(_) => 7,
            Self::String(_) => 8,
            Self::Strings(_) | Self::I32s(_) | Self::F32s(_) => 9,
        }
    }

    fn write(&self, out: &mut impl Write) -> io::Result<()> {
        match self {
            Self::U32(number) => out.write_all(&number.to_le_bytes()),
            Self::F32(number) => out.write_all(&number.to_le_bytes()),
            Self::Bool(truth) => out.write_all(&[u8::from(*truth)]),
            Self::String(text) => write_text(out, text),
            Self::Strings(texts) => {
                write_array_head(out, 8, texts.len())?;
                texts.iter().try_for_each(|text| write_text(out, text))
            }
            Self::I32s(numbers) => {
                write_array_head(out, 5, numbers.len())?;
                numbers.iter().try_for_each(|number| out.write_all(&number.to_le_bytes()))
            }
            Self::F32s(numbers) => {
                write_array_head(out, 6, numbers.len())?;
                numbers.iter().try_for_each(|number| out.write_all(&number.to_le_bytes()))
            }
        }
    }
}

/// A named f32 tensor, stored row by row.
#[derive(Clone, Debug, PartialEq)]
pub struct Tensor {
    name: String,
    /// ggml's order: the length of a row first, then the number of rows.
    lengths: Vec<u64>,
    data: Vec<f32>,
}

/// A model file in memory. Entries and tensors are written in the order in which they were added.
#[derive(Clone, Debug, Default)]
pub struct Gguf {
    entries: Vec<(String, Value)>,
    tensors: Vec<Tensor>,
}

impl Gguf {
    /// An empty file for a model architecture, such as `llama`.
    pub fn new(architecture: &str) -> Self {
        let mut file = Self::default();
        file.set("general.architecture", Value::String(architecture.to_owned()));
        file
    }

    /// Adds one metadata entry. The format wants each key once; a reader takes the first.
    pub fn set(&mut self, key: &str, value: Value) -> &mut Self {
        self.entries.push((key.to_owned(), value));
        self
    }

    /// Adds a vector.
    pub fn vector(&mut self, name: &str, data: Vec<f32>) -> &mut Self {
        self.tensors.push(Tensor { name: name.to_owned(), lengths: vec![data.len() as u64], data });
        self
    }

    /// Adds a matrix of rows that are `columns` long; what is left of an incomplete last row is cut off.
    pub fn matrix(&mut self, name: &str, columns: usize, mut data: Vec<f32>) -> &mut Self {
        let rows = data.len().checked_div(columns).unwrap_or(0);
        data.truncate(rows * columns);
        self.tensors.push(Tensor { name: name.to_owned(), lengths: vec![columns as u64, rows as u64], data });
        self
    }

    /// Adds a tensor of any number of dimensions, the innermost length first. What is missing is zero and what is too
    /// much is cut off.
    pub fn tensor(&mut self, name: &str, lengths: &[usize], mut data: Vec<f32>) -> &mut Self {
        data.resize(lengths.iter().product(), 0.0);
        let lengths = lengths.iter().map(|length| *length as u64).collect();
        self.tensors.push(Tensor { name: name.to_owned(), lengths, data });
        self
    }

    /// Writes the whole file. Fails only when the writer does.
    pub fn write(&self, out: &mut impl Write) -> io::Result<()> {
        let mut out = Counted { inner: out, written: 0 };
        out.write_all(b"GGUF")?;
        out.write_all(&VERSION.to_le_bytes())?;
        write_len(&mut out, self.tensors.len())?;
        write_len(&mut out, self.entries.len())?;
        for (key, value) in &self.entries {
            write_text(&mut out, key)?;
            out.write_all(&value.kind().to_le_bytes())?;
            value.write(&mut out)?;
        }
        let mut offset = 0_u64;
        for tensor in &self.tensors {
            write_text(&mut out, &tensor.name)?;
            out.write_all(&u32::try_from(tensor.lengths.len()).unwrap_or(u32::MAX).to_le_bytes())?;
            tensor.lengths.iter().try_for_each(|length| out.write_all(&length.to_le_bytes()))?;
            out.write_all(&GGML_TYPE_F32.to_le_bytes())?;
            out.write_all(&offset.to_le_bytes())?;
            offset += (tensor.data.len() * size_of::<f32>()).next_multiple_of(ALIGNMENT) as u64;
        }
        out.pad()?;
        for tensor in &self.tensors {
            let bytes: Vec<u8> = tensor.data.iter().flat_map(|number| number.to_le_bytes()).collect();
            out.write_all(&bytes)?;
            out.pad()?;
        }
        Ok(())
    }
}

/// Knows how much was written, which is what alignment is about.
struct Counted<'a, W> {
    inner: &'a mut W,
    written: usize,
}

impl<W: Write> Counted<'_, W> {
    fn pad(&mut self) -> io::Result<()> {
        let missing = self.written.next_multiple_of(ALIGNMENT) - self.written;
        self.write_all(&[0; ALIGNMENT][..missing])
    }
}

impl<W: Write> Write for Counted<'_, W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let taken = self.inner.write(bytes)?;
        self.written += taken;
        Ok(taken)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.inner.flush()
    }
}

fn write_len(out: &mut impl Write, length: usize) -> io::Result<()> {
    out.write_all(&(length as u64).to_le_bytes())
}

fn write_text(out: &mut impl Write, text: &str) -> io::Result<()> {
    write_len(out, text.len())?;
    out.write_all(text.as_bytes())
}

fn write_array_head(out: &mut impl Write, kind: u32, length: usize) -> io::Result<()> {
    out.write_all(&kind.to_le_bytes())?;
    write_len(out, length)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(file: &Gguf) -> Vec<u8> {
        let mut out = Vec::new();
        file.write(&mut out).unwrap();
        out
    }

    #[test]
    fn an_empty_file_is_magic_version_counts_and_the_architecture() {
        let mut expected = b"GGUF\x03\0\0\0".to_vec();
        expected.extend(0_u64.to_le_bytes());
        expected.extend(1_u64.to_le_bytes());
        expected.extend(20_u64.to_le_bytes());
        expected.extend(b"general.architecture");
        expected.extend(8_u32.to_le_bytes());
        expected.extend(5_u64.to_le_bytes());
        expected.extend(b"llama");
        expected.resize(expected.len().next_multiple_of(ALIGNMENT), 0);
        assert_eq!(bytes(&Gguf::new("llama")), expected);
    }

    #[test]
    fn every_tensor_starts_at_a_multiple_of_the_alignment() {
        let mut file = Gguf::new("llama");
        file.vector("a", vec![1.0; 3]).matrix("b", 2, vec![2.0; 4]);
        let all = bytes(&file);
        assert_eq!(all.len() % ALIGNMENT, 0);
        let data = &all[all.len() - 2 * ALIGNMENT..];
        assert_eq!(data[..4], 1.0_f32.to_le_bytes());
        assert_eq!(data[12..ALIGNMENT], [0; 20]);
        assert_eq!(data[ALIGNMENT..ALIGNMENT + 4], 2.0_f32.to_le_bytes());
    }

    #[test]
    fn arrays_tell_their_element_type_and_length() {
        let mut out = Vec::new();
        Value::I32s(vec![7, -1]).write(&mut out).unwrap();
        assert_eq!(out, [5, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 7, 0, 0, 0, 255, 255, 255, 255]);
        out.clear();
        Value::Strings(vec!["ä".to_owned()]).write(&mut out).unwrap();
        assert_eq!(out, [8, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 0xc3, 0xa4]);
    }
}
