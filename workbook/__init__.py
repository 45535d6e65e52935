"The workbook beside the package: its pages, pictures, measurements, puzzles and tour; no wheel holds it."
