//! Writes GGUF version 3 files: typed metadata, tensors, alignment 32.
//!
//! Used for the sample models only. A tensor's numbers are kept in memory, or computed while the file is
//! written, so a model needs memory for one matrix only. The layout follows ggml's
//! `docs/gguf.md`, all integers little-endian:
//!
//! ```text
//!  "GGUF" | version u32 | tensors u64 | entries u64
//!  entry*       name, type u32, value
//!  tensor info* name, dimensions u32, lengths u64*, type u32, offset u64 (from the start of the data)
//!  zeroes up to a multiple of 32
//!  tensor data*, each zero-padded to a multiple of 32
//! ```

use std::io::{self, Write};

use super::WeightKind;

/// Alignment of offsets in the data section, in bytes; 32 is the default of readers.
pub(crate) const ALIGNMENT: usize = 32;
pub(crate) const VERSION: u32 = 3;

/// A metadata value. The format demands one type per array.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum MetadataValue {
    U32(u32),
    F32(f32),
    Bool(bool),
    String(String),
    Strings(Vec<String>),
    I32s(Vec<i32>),
    /// Used for the mean of each colour channel.
    F32s(Vec<f32>),
}

impl MetadataValue {
    const fn type_code(&self) -> u32 {
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
            Self::I32s(numbers) => write_array(out, 5, numbers, |number| number.to_le_bytes()),
            Self::F32s(numbers) => write_array(out, 6, numbers, |number| number.to_le_bytes()),
        }
    }
}

type FillFn = Box<dyn Fn(&mut dyn Write) -> io::Result<()>>;

enum TensorData {
    Held(Vec<f32>),
    Computed(FillFn),
}

/// A named tensor in row-major order.
struct WrittenTensor {
    name: String,
    /// Dimensions in ggml's order: row length first, then the number of rows.
    lengths: Vec<u64>,
    kind: WeightKind,
    data: TensorData,
}

impl WrittenTensor {
    fn bytes(&self) -> u64 {
        self.kind.bytes(self.lengths.iter().product())
    }

    fn write(&self, out: &mut impl Write) -> io::Result<()> {
        match &self.data {
            TensorData::Held(numbers) => write_numbers(out, numbers),
            TensorData::Computed(fill) => {
                let mut counted = CountingWriter { inner: out, written: 0 };
                fill(&mut counted)?;
                if counted.written as u64 == self.bytes() {
                    return Ok(());
                }
                Err(io::Error::other(format!(
                    "tensor {} has {} bytes and was given {}",
                    self.name,
                    self.bytes(),
                    counted.written
                )))
            }
        }
    }
}

/// A model file under construction. Entries and tensors are written in the order of insertion.
#[derive(Default)]
pub(crate) struct GgufWriter {
    entries: Vec<(String, MetadataValue)>,
    tensors: Vec<WrittenTensor>,
}

impl GgufWriter {
    pub(crate) fn new(architecture: &str) -> Self {
        let mut file = Self::default();
        file.set("general.architecture", MetadataValue::String(architecture.to_owned()));
        file
    }

    /// Adds a metadata entry. The format demands unique keys; readers use the first one.
    pub(crate) fn set(&mut self, key: &str, value: MetadataValue) -> &mut Self {
        self.entries.push((key.to_owned(), value));
        self
    }

    pub(crate) fn numbers<const N: usize>(&mut self, prefix: &str, entries: [(&str, u32); N]) -> &mut Self {
        for (key, number) in entries {
            self.set(&format!("{prefix}.{key}"), MetadataValue::U32(number));
        }
        self
    }

    pub(crate) fn vector(&mut self, name: &str, data: Vec<f32>) -> &mut Self {
        self.held_tensor(name, vec![data.len() as u64], data)
    }

    /// Adds a matrix with `columns` numbers per row; an incomplete last row is cut off.
    pub(crate) fn matrix(&mut self, name: &str, columns: usize, mut data: Vec<f32>) -> &mut Self {
        let rows = data.len().checked_div(columns).unwrap_or(0);
        data.truncate(rows * columns);
        self.held_tensor(name, vec![columns as u64, rows as u64], data)
    }

    /// Adds a tensor with `lengths`, the innermost first. Missing values are zero, excess values are cut off.
    pub(crate) fn tensor(&mut self, name: &str, lengths: &[usize], mut data: Vec<f32>) -> &mut Self {
        data.resize(lengths.iter().product(), 0.0);
        let lengths = lengths.iter().map(|length| *length as u64).collect();
        self.held_tensor(name, lengths, data)
    }

    fn held_tensor(&mut self, name: &str, lengths: Vec<u64>, data: Vec<f32>) -> &mut Self {
        self.tensors.push(WrittenTensor {
            name: name.to_owned(),
            lengths,
            kind: WeightKind::F32,
            data: TensorData::Held(data),
        });
        self
    }

    /// Adds a tensor whose numbers are computed while the file is written. `lengths`: dimensions, the
    /// innermost first. Writing fails if `fill` yields another number of bytes than the dimensions demand.
    pub(crate) fn computed_tensor(
        &mut self,
        name: &str,
        kind: WeightKind,
        lengths: &[u64],
        fill: FillFn,
    ) -> &mut Self {
        self.tensors.push(WrittenTensor {
            name: name.to_owned(),
            lengths: lengths.to_vec(),
            kind,
            data: TensorData::Computed(fill),
        });
        self
    }

    /// Fails if the writer fails, or if a tensor yields another size than announced.
    pub(crate) fn write(&self, out: &mut impl Write) -> io::Result<()> {
        let mut out = CountingWriter { inner: out, written: 0 };
        out.write_all(b"GGUF")?;
        out.write_all(&VERSION.to_le_bytes())?;
        write_len(&mut out, self.tensors.len())?;
        write_len(&mut out, self.entries.len())?;
        for (key, value) in &self.entries {
            write_text(&mut out, key)?;
            out.write_all(&value.type_code().to_le_bytes())?;
            value.write(&mut out)?;
        }
        let mut offset = 0_u64;
        for tensor in &self.tensors {
            write_text(&mut out, &tensor.name)?;
            out.write_all(&u32::try_from(tensor.lengths.len()).unwrap_or(u32::MAX).to_le_bytes())?;
            tensor.lengths.iter().try_for_each(|length| out.write_all(&length.to_le_bytes()))?;
            out.write_all(&tensor.kind.tensor_type().to_le_bytes())?;
            out.write_all(&offset.to_le_bytes())?;
            offset += tensor.bytes().next_multiple_of(ALIGNMENT as u64);
        }
        out.pad()?;
        for tensor in &self.tensors {
            tensor.write(&mut out)?;
            out.pad()?;
        }
        Ok(())
    }
}

struct CountingWriter<'a, W> {
    inner: &'a mut W,
    written: usize,
}

impl<W: Write> CountingWriter<'_, W> {
    fn pad(&mut self) -> io::Result<()> {
        let missing = self.written.next_multiple_of(ALIGNMENT) - self.written;
        self.write_all(&[0; ALIGNMENT][..missing])
    }
}

impl<W: Write> Write for CountingWriter<'_, W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let taken = self.inner.write(bytes)?;
        self.written += taken;
        Ok(taken)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.inner.flush()
    }
}

/// Writes numbers as little-endian f32, in blocks of 4 KiB.
pub(crate) fn write_numbers(out: &mut (impl Write + ?Sized), numbers: &[f32]) -> io::Result<()> {
    for numbers in numbers.chunks(1024) {
        let bytes: Vec<u8> = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
        out.write_all(&bytes)?;
    }
    Ok(())
}

fn write_len(out: &mut impl Write, length: usize) -> io::Result<()> {
    out.write_all(&(length as u64).to_le_bytes())
}

fn write_text(out: &mut impl Write, text: &str) -> io::Result<()> {
    write_len(out, text.len())?;
    out.write_all(text.as_bytes())
}

fn write_array<T>(
    out: &mut impl Write,
    kind: u32,
    items: &[T],
    bytes: impl Fn(&T) -> [u8; 4],
) -> io::Result<()> {
    write_array_head(out, kind, items.len())?;
    items.iter().try_for_each(|item| out.write_all(&bytes(item)))
}

fn write_array_head(out: &mut impl Write, kind: u32, length: usize) -> io::Result<()> {
    out.write_all(&kind.to_le_bytes())?;
    write_len(out, length)
}

#[cfg(test)]
mod tests {
    use super::*;

    impl GgufWriter {
        pub(crate) fn tensor_bytes(&self) -> u64 {
            self.tensors.iter().map(WrittenTensor::bytes).sum()
        }

        pub(crate) fn held_bytes(&self) -> u64 {
            self.tensors
                .iter()
                .filter(|tensor| matches!(tensor.data, TensorData::Held(_)))
                .map(WrittenTensor::bytes)
                .sum()
        }
    }

    fn bytes(file: &GgufWriter) -> Vec<u8> {
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
        assert_eq!(bytes(&GgufWriter::new("llama")), expected);
    }

    #[test]
    fn every_tensor_starts_at_a_multiple_of_the_alignment() {
        let mut file = GgufWriter::new("llama");
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
        MetadataValue::I32s(vec![7, -1]).write(&mut out).unwrap();
        assert_eq!(out, [5, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 7, 0, 0, 0, 255, 255, 255, 255]);
        out.clear();
        MetadataValue::Strings(vec!["ä".to_owned()]).write(&mut out).unwrap();
        assert_eq!(out, [8, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 0xc3, 0xa4]);
    }

    #[test]
    fn a_made_tensor_stands_where_the_header_says_and_the_next_one_is_aligned() {
        let mut file = GgufWriter::new("llama");
        file.computed_tensor(
            "half",
            WeightKind::F16,
            &[3, 1],
            Box::new(|out| out.write_all(&[1, 2, 3, 4, 5, 6])),
        );
        file.vector("next", vec![1.0]);
        assert_eq!(file.tensor_bytes(), 10);
        let all = bytes(&file);
        let data = &all[all.len() - 2 * ALIGNMENT..];
        assert_eq!(data[..8], [1, 2, 3, 4, 5, 6, 0, 0]);
        assert_eq!(data[ALIGNMENT..ALIGNMENT + 4], 1.0_f32.to_le_bytes());
    }

    #[test]
    fn a_tensor_that_is_filled_with_too_little_is_an_error_that_names_it() {
        let mut file = GgufWriter::new("llama");
        file.computed_tensor("short", WeightKind::F16, &[4], Box::new(|out| out.write_all(&[0; 6])));
        let failed = file.write(&mut Vec::new()).unwrap_err();
        assert!(failed.to_string().contains("short has 8 bytes and was given 6"), "{failed}");
    }
}
