//! Pieces cut at every point, and edits at their seams.

use super::*;

fn edit(range: Range<u64>, text: &str) -> ByteEdit {
    ByteEdit { range, text: text.to_owned() }
}

fn applied(text: &str, size: usize, edits: &[ByteEdit]) -> String {
    let pieces = text.as_bytes().chunks(size).map(Bytes::copy_from_slice).collect();
    let out = apply_edits(pieces, edits.to_vec());
    String::from_utf8(out.iter().flat_map(|piece| piece.to_vec()).collect()).unwrap()
}

#[test]
fn edits_are_carried_out_wherever_the_seams_are() {
    for size in 1..12 {
        assert_eq!(applied("0123456789", size, &[]), "0123456789");
        assert_eq!(applied("0123456789", size, &[edit(0..1, ""), edit(9..10, "x")]), "12345678x");
        assert_eq!(applied("0123456789", size, &[edit(7..7, "b"), edit(2..7, "a")]), "01ab789");
        assert_eq!(applied("0123456789", size, &[edit(0..0, "a"), edit(0..10, ""), edit(5..5, "")]), "a");
        assert_eq!(
            applied("0123456789", size, &[edit(9..9, "x"), edit(3..4, "long text")]),
            "012long text45678x9"
        );
    }
}

#[test]
fn what_stays_is_not_copied() {
    let piece = Bytes::from_static(b"0123456789");
    let out = apply_edits(VecDeque::from([piece.clone()]), vec![edit(4..5, "")]);
    assert_eq!((out[0].as_ptr(), out[1].as_ptr()), (piece.as_ptr(), piece[5..].as_ptr()));
}

#[test]
fn commas_go_with_what_they_part() {
    // 0:a 1:b 2:c 3:d with commas between.
    let place = |index: u32| {
        let at = u64::from(index) * 2;
        JsonPlace {
            index,
            range: at..at + 1,
            comma_before: (index > 0).then(|| at - 1),
            comma_after: (index < 3).then_some(at + 1),
        }
    };
    for (gone, left) in [
        (vec![], "a,b,c,d"),
        (vec![0], "b,c,d"),
        (vec![1], "a,c,d"),
        (vec![3], "a,b,c"),
        (vec![2, 3], "a,b"),
        (vec![0, 3], "b,c"),
        (vec![0, 2], "b,d"),
        (vec![1, 3], "a,c"),
        (vec![0, 1, 2, 3], ""),
    ] {
        let places: Vec<JsonPlace> = gone.iter().map(|index| place(*index)).collect();
        let cut = removal_ranges(&places.iter().collect::<Vec<_>>(), 4);
        let edits: Vec<ByteEdit> = cut.into_iter().map(|range| edit(range, "")).collect();
        assert_eq!(applied("a,b,c,d", 3, &edits), left, "{gone:?}");
    }
}
