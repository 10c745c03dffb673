//! Checks the memory report byte by byte, with a reader written from `docs/patches.md`, independent of
//! `proxy/sensors`.

use std::path::Path;

use warden_rig::{Context as _, Outcome, Trouble};

use super::build::{Flavour, Shape, binary};
use super::{CAP, LONG, REPORT, TRIM, start};

const RECORDS: usize = 62;

#[derive(Debug, PartialEq, Eq)]
struct Record {
    at: usize,
    seq: u32,
    state: u32,
    device: i32,
    context: u32,
    values: Vec<u64>,
}

fn number<const N: usize>(bytes: &[u8], at: usize) -> Result<[u8; N], Trouble> {
    bytes.get(at..at + N).and_then(|piece| piece.try_into().ok()).context("a short file")
}

fn records(file: &[u8]) -> Result<Vec<Record>, Trouble> {
    let mut all = Vec::new();
    for index in 0..RECORDS {
        let at = 128 + 256 * index;
        let values = (0..30).map(|word| Ok(u64::from_ne_bytes(number(file, at + 16 + 8 * word)?)));
        all.push(Record {
            at,
            seq: u32::from_ne_bytes(number(file, at)?),
            state: u32::from_ne_bytes(number(file, at + 4)?),
            device: i32::from_ne_bytes(number(file, at + 8)?),
            context: u32::from_ne_bytes(number(file, at + 12)?),
            values: values.collect::<Result<_, Trouble>>()?,
        });
    }
    Ok(all)
}

/// Records of the living contexts, from the program's output.
fn said(output: &str) -> Result<Vec<Record>, Trouble> {
    let mut all = Vec::new();
    for line in output.lines().filter_map(|line| line.strip_prefix("live ")) {
        let mut words = line.split(' ');
        let mut next = || words.next().context(line);
        let (context, device, at) = (next()?.parse()?, next()?.parse()?, next()?.parse()?);
        let values = words.map(str::parse).collect::<Result<_, _>>()?;
        all.push(Record { at, seq: 0, state: 1, device, context, values });
    }
    Ok(all)
}

async fn run(path: &Path, shape: Shape, scenario: &str) -> Result<String, Trouble> {
    let program = binary(shape, Flavour::Plain).await?.context("it needs no sanitizer")?;
    let path = path.to_str().context("a path")?;
    let env = [(REPORT, path), (CAP, "16"), (TRIM, "3600")];
    start(&program, &[scenario, "legacy"], &env, format!("{scenario} {shape:?}"))?.succeeds().await
}

#[tokio::test]
async fn the_report_is_laid_out_as_described_and_its_records_are_at_rest() -> Outcome {
    for shape in Shape::ALL {
        let folder = tempfile::tempdir()?;
        let path = folder.path().join("report");
        let output = run(&path, shape, "report").await?;
        let file = std::fs::read(&path)?;
        assert_eq!(file.len(), 16384);
        assert_eq!(file.get(..8), Some(&b"LWREPT1\0"[..]));
        let word = |at: usize| number(&file, at).map(u32::from_ne_bytes);
        let long = |at: usize| number(&file, at).map(u64::from_ne_bytes);
        assert_eq!((word(8)?, word(12)?, word(16)?), (1, 256, 62));
        assert!(output.contains(&format!("pid {}\n", word(20)?)), "{output}");
        assert!(long(24)? > 1_700_000_000_000);
        // A build without a feature does not report it as active.
        let (cap, trim) = (Shape::WITH_MAP.contains(&shape), Shape::WITH_IDLE_GRAPHS.contains(&shape));
        let active = u64::from(cap) | 8 | if trim { 16 } else { 0 };
        let settings = (if cap { 16 } else { 0 }, if trim { 3_600_000 } else { 0 });
        assert_eq!((long(32)?, long(40)?, long(48)?), (active, settings.0, settings.1), "{shape:?}");
        assert_eq!((long(56)?, long(64)?, long(72)?), (0, 0, 10_000));
        assert!(file.get(80..128).context("a header")?.iter().all(|byte| *byte == 0));
        assert!(file.get(128 + 62 * 256..).context("a rest")?.iter().all(|byte| *byte == 0));

        let found = records(&file)?;
        assert!(found.iter().all(|record| record.seq % 2 == 0), "all at rest: {found:?}");
        let expected = said(&output)?;
        // 62 of 71 records: two contexts ended, and the last context reused one of their places.
        assert_eq!(expected.len(), 61, "{output}");
        let mut living = 0;
        for record in &found {
            // At the end, only the first and the last context live.
            let is_last = record.context == 70;
            living += usize::from(record.state == 1);
            assert_eq!(record.state == 1, record.context == 0 || is_last, "{record:?}");
            let Some(told) = expected.iter().find(|told| told.context == record.context) else {
                assert_eq!((record.state, record.context), (2, 4), "{record:?}");
                continue;
            };
            assert_eq!((record.at, record.device), (told.at, told.device));
            assert_eq!(record.values, told.values);
            let computes = if is_last { 1 } else { u64::from(record.context) + 1 };
            assert_eq!(record.values.first(), Some(&computes));
        }
        assert_eq!(living, 2);

        // Values of the context with 50 computations: one graph, its nodes, pool and handle.
        let fifty = found.iter().find(|record| record.context == 49).context("a context")?;
        let value = |index: usize| fifty.values.get(index).copied().unwrap_or(u64::MAX);
        let has_graphs = shape != Shape::Plain;
        assert_eq!(fifty.device, 1);
        assert_eq!((value(1), value(2)), (u64::from(has_graphs), u64::from(has_graphs)));
        assert_eq!(value(14), 1, "handles");
        assert_eq!(value(15), if shape == Shape::Spaces { 4096 } else { 0 }, "workspaces");
        assert_eq!((value(10), value(11)), (65536, 65536), "pool");
        assert!(value(20) > 1_700_000_000_000);
        assert!(fifty.values.get(21..).is_some_and(|rest| rest.iter().all(|value| *value == 0)));
    }
    Ok(())
}

#[tokio::test]
async fn a_context_at_the_address_of_an_old_one_has_a_record_of_its_own() -> Outcome {
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("report");
    run(&path, Shape::Spaces, "same_address").await?;
    let found = records(&std::fs::read(&path)?)?;
    let used: Vec<_> = found.iter().filter(|record| record.state != 0).collect();
    assert_eq!(used.len(), 3, "{used:?}");
    for (life, record) in used.iter().enumerate() {
        let life = u32::try_from(life)?;
        assert_eq!((record.state, record.context, record.device), (2, life, i32::try_from(life)?));
    }
    Ok(())
}

#[tokio::test]
async fn a_file_that_is_no_report_is_left_as_it_is_and_the_server_goes_on() -> Outcome {
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("model.gguf");
    for content in [&b"GGUF and what follows"[..], &[1; 16384], &[0; 100], b"LWREPT1\0"] {
        std::fs::write(&path, content)?;
        let output = run(&path, Shape::Spaces, "same_address").await?;
        assert_eq!(std::fs::read(&path)?, content);
        assert_eq!(output.matches("cannot be written").count(), 1, "{output}");
    }
    let output = run(Path::new("/nowhere/report"), Shape::Spaces, "same_address").await?;
    assert_eq!(output.matches("cannot be written").count(), 1, "{output}");
    Ok(())
}

#[tokio::test]
async fn a_file_that_is_cut_short_or_cannot_grow_costs_the_report_and_not_the_server() -> Outcome {
    for shape in Shape::ALL {
        let folder = tempfile::tempdir()?;
        run(&folder.path().join("report"), shape, "report_cut").await?;
    }
    Ok(())
}

#[tokio::test]
async fn processes_that_inherit_one_file_do_not_write_over_each_other() -> Outcome {
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("report");
    let name = path.to_str().context("a path")?;
    let program = binary(Shape::Spaces, Flavour::Plain).await?.context("it needs no sanitizer")?;
    let env = [(REPORT, name)];
    let mut first = start(&program, &["report_held"], &env, "first".into())?;
    let written = || -> Result<u32, Trouble> {
        let file = std::fs::read(&path).unwrap_or_default();
        if file.len() == 16384 && number::<8>(&file, 0)? == *b"LWREPT1\0" {
            Ok(number(&file, 20).map(u32::from_ne_bytes)?)
        } else {
            Ok(0)
        }
    };
    warden_rig::wait::wait_until("the first one's report", LONG, async || {
        written().is_ok_and(|pid| pid != 0)
    })
    .await?;
    let owner = written()?;
    let mut second = start(&program, &["report_held"], &env, "second".into())?;
    let own = || -> Option<std::path::PathBuf> {
        let entries = std::fs::read_dir(folder.path()).ok()?;
        let names = entries.filter_map(|entry| Some(entry.ok()?.path()));
        names.into_iter().find(|other| {
            let number =
                other.extension().and_then(|end| end.to_str()).and_then(|end| end.parse::<u32>().ok());
            number.is_some_and(|number| number != owner)
        })
    };
    warden_rig::wait::wait_until("the second one's own file", LONG, async || {
        own().is_some_and(|path| std::fs::read(path).is_ok_and(|file| file.starts_with(b"LWREPT1\0")))
    })
    .await?;
    let beside = own().context("a file")?;
    let pid = u32::from_ne_bytes(number(&std::fs::read(&beside)?, 20)?);
    assert_eq!(beside, path.with_file_name(format!("report.{pid}")));
    assert_eq!(written()?, owner, "the first one's file is its own");
    std::fs::write(folder.path().join("report.go"), "")?;
    first.succeeds().await?;
    second.succeeds().await?;
    assert!(!beside.exists(), "nobody else would remove it");
    let used = records(&std::fs::read(&path)?)?.into_iter().find(|record| record.state != 0);
    assert_eq!(used.context("a record")?.values.first(), Some(&7));
    Ok(())
}

#[tokio::test]
async fn an_older_report_is_begun_anew() -> Outcome {
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("report");
    run(&path, Shape::Spaces, "report").await?;
    run(&path, Shape::Spaces, "same_address").await?;
    let used = records(&std::fs::read(&path)?)?.iter().filter(|record| record.state != 0).count();
    assert_eq!(used, 3);
    Ok(())
}
