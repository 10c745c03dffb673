//! Compares the containers that a set depends on with the reviewed versions.

use std::collections::HashMap;

use super::place::{ResolvedPlace, SourceReader, format_lines};
use crate::error::Result;
use crate::judgement::{JudgementReason, PatchStatus};
use crate::scan::normal::{CodePiece, container_pieces, hash_containers};
use crate::set::fingerprints::SeamSeen;
use crate::set::fingerprints::{ABSENT_HASH, KnownVersion};
use crate::set::{PatchSet, SetSeam};
use crate::tree::SourceTree;

const MAX_SHOWN_PIECES: usize = 3;
const MAX_PIECE_CHARS: usize = 64;

/// The set's seams in a tree, in the set's order.
///
/// # Errors
/// Fails if an existing file of the tree cannot be read.
pub fn fingerprint(set: &PatchSet, tree: &dyn SourceTree) -> Result<Vec<SeamSeen>> {
    compare_seams(set, &SourceReader::new(tree)).map(|(seen, _)| seen)
}

pub(super) fn compare_seams(
    set: &PatchSet,
    reader: &SourceReader<'_>,
) -> Result<(Vec<SeamSeen>, Vec<JudgementReason>)> {
    let mut all = Vec::new();
    let mut reasons = Vec::new();
    for seam in &set.seams {
        let (seen, reason) = compare_seam(set, seam, reader)?;
        all.extend(seen);
        reasons.extend(reason);
    }
    Ok((all, reasons))
}

fn compare_seam(
    set: &PatchSet,
    seam: &SetSeam,
    reader: &SourceReader<'_>,
) -> Result<(Option<SeamSeen>, Option<JudgementReason>)> {
    let reason = |status, text: String| JudgementReason::new(status, format!("seam `{}`", seam.id), text);
    let (file, found) = match reader.resolve(&seam.files, Some(&seam.container))? {
        ResolvedPlace::Containers(file, found) => (file, found),
        ResolvedPlace::NoFile => {
            let seen = absent_seam(set, seam, None);
            if seen.known.is_some() {
                return Ok((Some(seen), None));
            }
            let hint = reader.suggest_places(set, None, Some(&seam.container))?;
            let (container, files) = (&seam.container, seam.files.join(", "));
            let text = format!("none of the files of {container} exists: {files}{hint}");
            return Ok((Some(seen), Some(reason(PatchStatus::Unverified, text))));
        }
        ResolvedPlace::NoContainer(file) => {
            let seen = absent_seam(set, seam, Some(&file.path));
            if seen.known.is_some() {
                return Ok((Some(seen), None));
            }
            let hint = reader.suggest_places(set, Some(&file.path), Some(&seam.container))?;
            let text = format!("{} is not there{hint}", seam.container);
            return Ok((Some(seen), Some(reason(PatchStatus::Unverified, text).at(&file.path, None))));
        }
        ResolvedPlace::Unsure(file, line, why) => {
            return Ok((None, Some(reason(PatchStatus::Refused, why).at(&file.path, Some(line)))));
        }
        ResolvedPlace::Whole(_) => return Ok((None, None)),
    };
    let source = &file.source;
    let starts: Vec<usize> = found.iter().map(|found| source.line(found.start)).collect();
    if found.len() > 1 && !seam.overloads {
        let text = format!(
            "one {} is expected, there are {}, in {}: qualify its name, or say `overloads = true`",
            seam.container,
            found.len(),
            format_lines(&starts)
        );
        return Ok((None, Some(reason(PatchStatus::Refused, text).at(&file.path, starts.first().copied()))));
    }
    let pieces: Vec<CodePiece> = found.iter().flat_map(|found| container_pieces(source, found)).collect();
    let hash = hash_containers(source, &found);
    let first = found.first();
    let seen = SeamSeen {
        seam: seam.id.clone(),
        file: Some(file.path.clone()),
        lines: first.map(|found| (source.line(found.start), source.line(found.end.saturating_sub(1)))),
        known: known_label(set, seam, &hash),
        hash,
        statements: pieces.iter().map(|piece| piece.hash.clone()).collect(),
    };
    if seen.known.is_some() {
        return Ok((Some(seen), None));
    }
    let (line, change) = describe_difference(&pieces, set.fingerprints.versions(&seam.id));
    let condition = first.and_then(|found| source.conditions(found.start).last());
    let condition = condition.map(|text| format!(", only compiled under `{text}`")).unwrap_or_default();
    let text = format!(
        "{} is a version that nobody has looked at ({}{condition}){change}",
        seam.container, seen.hash
    );
    let line = line.or(seen.lines.map(|(first, _)| first));
    Ok((Some(seen), Some(reason(PatchStatus::Unverified, text).at(&file.path, line))))
}

fn known_label(set: &PatchSet, seam: &SetSeam, hash: &str) -> Option<String> {
    let versions = set.fingerprints.versions(&seam.id);
    versions.iter().find(|version| version.hash == hash).map(|version| version.label.clone())
}

fn absent_seam(set: &PatchSet, seam: &SetSeam, file: Option<&str>) -> SeamSeen {
    let known = known_label(set, seam, ABSENT_HASH);
    SeamSeen {
        seam: seam.id.clone(),
        file: file.map(str::to_owned),
        hash: ABSENT_HASH.to_owned(),
        known: known.or_else(|| seam.optional.then(|| ABSENT_HASH.to_owned())),
        ..SeamSeen::default()
    }
}

/// Describes the difference to the nearest known version: the line of the first new piece, and a text for the
/// end of a sentence.
fn describe_difference(pieces: &[CodePiece], known: &[KnownVersion]) -> (Option<usize>, String) {
    let common = |version: &KnownVersion| {
        let mut left = count_hashes(&version.statements);
        pieces.iter().filter(|piece| take_hash(&mut left, &piece.hash)).count()
    };
    // `max_by` returns the last of several nearest versions, which is the newest.
    let nearest = known.iter().filter(|version| !version.statements.is_empty()).max_by(|a, b| {
        // Divide by both lengths: otherwise a long version would seem near to any container.
        let share = |version: &KnownVersion| (2 * common(version), version.statements.len() + pieces.len());
        let ((a, all_a), (b, all_b)) = (share(a), share(b));
        (a * all_b).cmp(&(b * all_a))
    });
    let Some(nearest) = nearest else {
        return (None, "; no version is known that it could be compared with".to_owned());
    };
    let mut left = count_hashes(&nearest.statements);
    let new: Vec<&CodePiece> = pieces.iter().filter(|piece| !take_hash(&mut left, &piece.hash)).collect();
    let gone: usize = left.values().sum();
    let shown: Vec<String> = new
        .iter()
        .take(MAX_SHOWN_PIECES)
        .map(|piece| format!("line {} `{}`", piece.line, shorten_piece(&piece.text)))
        .collect();
    let more = match new.len().saturating_sub(MAX_SHOWN_PIECES) {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    let new_text =
        if new.is_empty() { "nothing new".to_owned() } else { format!("new: {}{more}", shown.join(", ")) };
    let gone_text = match gone {
        0 if new.is_empty() => "the same pieces in another order".to_owned(),
        gone => format!("{gone} of its {} pieces gone", nearest.statements.len()),
    };
    let origin: Vec<&str> = [nearest.source.as_str(), nearest.commit.as_str()]
        .into_iter()
        .filter(|text| !text.is_empty())
        .collect();
    let origin = if origin.is_empty() { String::new() } else { format!(" ({})", origin.join(" ")) };
    let text = format!("; against {}{origin}: {new_text}; {gone_text}", nearest.label);
    (new.first().map(|piece| piece.line), text)
}

fn count_hashes(hashes: &[String]) -> HashMap<&str, usize> {
    let mut counts = HashMap::new();
    for hash in hashes {
        *counts.entry(hash.as_str()).or_insert(0) += 1;
    }
    counts
}

fn take_hash(left: &mut HashMap<&str, usize>, hash: &str) -> bool {
    match left.get_mut(hash) {
        Some(count) if *count > 0 => {
            *count -= 1;
            true
        }
        _ => false,
    }
}

fn shorten_piece(text: &str) -> String {
    if text.chars().count() <= MAX_PIECE_CHARS {
        return text.to_owned();
    }
    let mut short: String = text.chars().take(MAX_PIECE_CHARS).collect();
    short.push('…');
    short
}
