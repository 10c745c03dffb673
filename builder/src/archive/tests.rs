//! Tests with hand-made archives, valid and malicious.

use std::fs;
use std::io::Write;
use std::path::PathBuf;

use proptest::prelude::*;
use tokio_util::sync::CancellationToken;

use super::*;

/// An entry of a test archive: name, and content or link target.
pub(crate) enum Made<'a> {
    File(&'a str, &'a [u8]),
    Link(&'a str, &'a str),
}

/// The bytes of a tar with unchecked names.
pub(crate) fn tar(entries: &[Made<'_>]) -> Vec<u8> {
    let mut builder = tar::Builder::new(Vec::new());
    for entry in entries {
        let mut header = tar::Header::new_gnu();
        header.set_mode(0o644);
        let (name, data) = match entry {
            Made::File(name, data) => (name, *data),
            Made::Link(name, target) => {
                header.set_entry_type(tar::EntryType::Symlink);
                header.set_link_name_literal(target).unwrap();
                (name, &[][..])
            }
        };
        header.set_size(data.len() as u64);
        header.as_gnu_mut().unwrap().name[..name.len()].copy_from_slice(name.as_bytes());
        header.set_cksum();
        builder.append(&header, data).unwrap();
    }
    builder.into_inner().unwrap()
}

pub(crate) fn tar_gz(folder: &Path, entries: &[Made<'_>]) -> PathBuf {
    let path = folder.join("made.tar.gz");
    let mut out = flate2::write::GzEncoder::new(File::create(&path).unwrap(), flate2::Compression::fast());
    out.write_all(&tar(entries)).unwrap();
    out.finish().unwrap();
    path
}

const SMALL: ArchiveLimits = ArchiveLimits { bytes: 1 << 20, entries: 100 };

fn unpacked(path: &Path, top: &str) -> Result<tempfile::TempDir> {
    let into = tempfile::tempdir().unwrap();
    unpack(path, top, into.path(), SMALL, &CancellationToken::new(), &|_| true)?;
    Ok(into)
}

fn refused(entries: &[Made<'_>]) -> String {
    let folder = tempfile::tempdir().unwrap();
    let path = tar_gz(folder.path(), entries);
    unpacked(&path, "").unwrap_err().to_string()
}

#[test]
fn only_what_lies_below_the_chosen_folder_is_unpacked() {
    let folder = tempfile::tempdir().unwrap();
    let path = tar_gz(
        folder.path(),
        &[
            Made::File("top/a/one", b"1"),
            Made::File("./top/a/deep/two", b"2"),
            Made::File("top/ab/three", b"3"),
            Made::Link("top/a/deep/link", "../one"),
        ],
    );
    let into = unpacked(&path, "top/a").unwrap();
    assert_eq!(fs::read(into.path().join("one")).unwrap(), b"1");
    assert_eq!(fs::read(into.path().join("deep/two")).unwrap(), b"2");
    assert_eq!(fs::read(into.path().join("deep/link")).unwrap(), b"1");
    assert_eq!(fs::read_dir(into.path()).unwrap().count(), 2);
}

#[test]
fn xz_and_zip_are_read_too() {
    let folder = tempfile::tempdir().unwrap();
    let xz = folder.path().join("made.tar.xz");
    let mut out = liblzma::write::XzEncoder::new(File::create(&xz).unwrap(), 0);
    out.write_all(&tar(&[Made::File("top/a", b"xz")])).unwrap();
    out.finish().unwrap();
    assert_eq!(fs::read(unpacked(&xz, "top").unwrap().path().join("a")).unwrap(), b"xz");

    let zip = folder.path().join("made.zip");
    let mut out = zip::ZipWriter::new(File::create(&zip).unwrap());
    let options = zip::write::SimpleFileOptions::default();
    out.start_file("top/a", options).unwrap();
    out.write_all(b"zip").unwrap();
    out.add_symlink("top/link", "a", options).unwrap();
    out.finish().unwrap();
    let into = unpacked(&zip, "top").unwrap();
    assert_eq!(fs::read(into.path().join("link")).unwrap(), b"zip");
}

#[test]
fn a_name_that_leads_out_is_refused() {
    assert!(refused(&[Made::File("a/../../evil", b"")]).contains("leads out of the archive"));
    assert!(refused(&[Made::File("/etc/evil", b"")]).contains("absolute path"));
}

#[test]
fn a_link_that_leads_out_is_refused() {
    assert!(refused(&[Made::Link("a/link", "../../evil")]).contains("leads out of the source"));
    assert!(refused(&[Made::Link("link", "/etc/passwd")]).contains("leads out of the source"));
}

#[test]
fn writing_through_a_link_is_refused() {
    let entries = [Made::Link("a/here", "."), Made::File("a/here/file", b"")];
    assert!(refused(&entries).contains("through a link"));
    let entries = [Made::Link("a", "b"), Made::File("a", b"")];
    assert!(refused(&entries).contains("through a link"));
}

#[test]
fn more_bytes_than_allowed_are_refused() {
    let data = vec![0; 2 << 20];
    assert!(refused(&[Made::File("zeroes", &data)]).contains("more than 1 MiB"));
}

/// Writes a GNU sparse file of 8 MiB, of which the archive contains the last 512 bytes.
fn sparse(folder: &Path) -> PathBuf {
    const WHOLE: u64 = 8 << 20;
    let path = folder.join("sparse.tar.gz");
    let mut header = tar::Header::new_gnu();
    header.set_path("hole").unwrap();
    header.set_entry_type(tar::EntryType::GNUSparse);
    header.set_mode(0o644);
    header.set_size(512);
    let gnu = header.as_gnu_mut().unwrap();
    let octal = |field: &mut [u8], number: u64| field.copy_from_slice(format!("{number:011o}\0").as_bytes());
    octal(&mut gnu.sparse[0].offset, WHOLE - 512);
    octal(&mut gnu.sparse[0].numbytes, 512);
    octal(&mut gnu.realsize, WHOLE);
    header.set_cksum();
    let mut builder = tar::Builder::new(Vec::new());
    builder.append(&header, &[7; 512][..]).unwrap();
    let mut out = flate2::write::GzEncoder::new(File::create(&path).unwrap(), flate2::Compression::fast());
    out.write_all(&builder.into_inner().unwrap()).unwrap();
    out.finish().unwrap();
    path
}

#[test]
fn a_sparse_file_counts_with_its_holes() {
    let folder = tempfile::tempdir().unwrap();
    let path = sparse(folder.path());
    assert!(path.metadata().unwrap().len() < 4096);
    let error = unpacked(&path, "").unwrap_err().to_string();
    assert!(error.contains("more than 1 MiB"), "{error}");
    let room = ArchiveLimits { bytes: 9 << 20, ..SMALL };
    let into = tempfile::tempdir().unwrap();
    unpack(&path, "", into.path(), room, &CancellationToken::new(), &|_| true).unwrap();
    let content = fs::read(into.path().join("hole")).unwrap();
    assert_eq!((content.len(), content[0], content[content.len() - 1]), (8 << 20, 0, 7));
}

/// Writes a .tar.gz with an extension header of this type and size before a file.
fn extended(folder: &Path, kind: tar::EntryType, size: usize) -> PathBuf {
    let path = folder.join("extended.tar.gz");
    let mut header = tar::Header::new_gnu();
    header.set_entry_type(kind);
    header.set_size(size as u64);
    header.set_cksum();
    let mut builder = tar::Builder::new(Vec::new());
    let content = if kind == tar::EntryType::XHeader {
        let length = size.to_string().len();
        format!("{size} comment={}\n", "x".repeat(size - length - 10)).into_bytes()
    } else {
        vec![b'x'; size]
    };
    builder.append(&header, &*content).unwrap();
    let mut bytes = builder.into_inner().unwrap();
    // Without the two zero blocks that end an archive.
    bytes.truncate(bytes.len() - 1024);
    bytes.extend(tar(&[Made::File("a", b"1")]));
    let mut out = flate2::write::GzEncoder::new(File::create(&path).unwrap(), flate2::Compression::fast());
    out.write_all(&bytes).unwrap();
    out.finish().unwrap();
    path
}

#[test]
fn a_name_or_an_extension_header_above_64_kib_is_refused_and_not_shown() {
    let folder = tempfile::tempdir().unwrap();
    let room = ArchiveLimits { bytes: 64 << 20, ..SMALL };
    let walked = |kind, size| {
        let path = extended(folder.path(), kind, size);
        walk_entries(&path, room, &CancellationToken::new(), &mut |_| Ok(()))
    };
    for kind in [tar::EntryType::GNULongName, tar::EntryType::GNULongLink, tar::EntryType::XHeader] {
        let error = walked(kind, 8 << 20).unwrap_err().to_string();
        assert!(error.contains("64 KiB of headers") && error.len() < 400, "{kind:?}: {error}");
        walked(kind, 60 << 10).unwrap();
    }
}

#[test]
fn content_of_any_length_counts_as_no_header() {
    let folder = tempfile::tempdir().unwrap();
    let data = vec![7; 300 << 10];
    let path =
        tar_gz(folder.path(), &[Made::File("a", &data), Made::File("b", &data), Made::File("c", b"1")]);
    let mut names = Vec::new();
    let mut note = |entry: ArchiveEntry<'_>| {
        names.push(entry.name.to_owned());
        Ok(())
    };
    walk_entries(&path, SMALL, &CancellationToken::new(), &mut note).unwrap();
    assert_eq!(names, ["a", "b", "c"], "nothing was read of them by the visitor");
}

#[test]
fn an_error_shows_the_beginning_of_a_long_name() {
    let folder = tempfile::tempdir().unwrap();
    let zip = folder.path().join("made.zip");
    let mut out = zip::ZipWriter::new(File::create(&zip).unwrap());
    out.start_file(format!("/{}", "x".repeat(60_000)), zip::write::SimpleFileOptions::default()).unwrap();
    out.finish().unwrap();
    let error = unpacked(&zip, "").unwrap_err().to_string();
    assert!(error.contains("absolute path") && error.len() < 600, "{} bytes", error.len());
}

#[test]
fn more_entries_than_allowed_are_refused() {
    let names: Vec<String> = (0..101).map(|number| number.to_string()).collect();
    let entries: Vec<Made<'_>> = names.iter().map(|name| Made::File(name, b"")).collect();
    assert!(refused(&entries).contains("more than 100 entries"));
}

#[test]
fn an_archive_that_is_cut_off_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = tar_gz(folder.path(), &[Made::File("a", &[7; 5000])]);
    let bytes = fs::read(&path).unwrap();
    fs::write(&path, &bytes[..bytes.len() / 2]).unwrap();
    assert!(unpacked(&path, "").unwrap_err().to_string().contains("damaged or cut off"));
}

#[test]
fn a_file_that_is_no_archive_is_told_by_what_it_is() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.tar.gz");
    for (content, why) in [
        (&b"GGUF...."[..], "GGUF model"),
        (b"", "empty"),
        (b"BZh91AY", "bzip2"),
        (b"hello world", "68656c6c6f20"),
    ] {
        fs::write(&path, content).unwrap();
        let message = detect_format(&path).unwrap_err().to_string();
        assert!(message.contains(why), "{message}");
    }
}

#[test]
fn a_cancelled_walk_ends_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let path = tar_gz(folder.path(), &[Made::File("a", b"")]);
    let cancel = CancellationToken::new();
    cancel.cancel();
    assert!(matches!(walk_entries(&path, SMALL, &cancel, &mut |_| Ok(())), Err(BuilderError::Cancelled)));
}

#[test]
fn links_may_climb_only_within_the_tree_and_only_at_their_beginning() {
    assert!(stays_inside("a/b/link", "../../x/y"));
    assert!(stays_inside("link", "./x"));
    assert!(!stays_inside("link", ".."));
    assert!(!stays_inside("a/link", ".././../x"));
    // A later `..` cancels a component that may itself be a link to a higher folder.
    assert!(!stays_inside("a/link", "x/.."));
    assert!(!stays_inside("link", ""));
}

proptest! {
    #[test]
    fn a_normal_name_never_climbs(raw in "[a./\\\\]{0,20}") {
        if let Ok(name) = normalize_name(&raw) {
            prop_assert!(!name.starts_with('/'));
            prop_assert!(name.split('/').all(|part| part != ".." && part != "." ));
        }
    }
}
